# SPDX-License-Identifier: Apache-2.0
"""Products of torch's sparse tensors that require grad, against dense ones."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from sparsetir.build import build
from sparsetir.codegen.target import cpu_target
from sparsetir.errors import ArgumentError, ArgumentTypeError, LoweringError, StructureError

torch = pytest.importorskip("torch")
import sparsetir.torch  # noqa: E402
from sparsetir.torch.products import Assembled, ValuesFunction  # noqa: E402
from sparsetir.utils.caches import CACHES  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:Sparse")

LAYOUTS = {"csr": torch.sparse_csr, "csc": torch.sparse_csc, "coo": torch.sparse_coo, "dense": torch.strided}
PAIRS = [pair for pair in product(LAYOUTS, repeat=2) if pair != ("dense", "dense")]
BLOCKS = {"bsr": torch.sparse_bsr, "bsc": torch.sparse_bsc}
PAIRS += [*product(BLOCKS, ["dense"]), *product(["dense"], BLOCKS), *product(BLOCKS, repeat=2)]
PAIRS += [("bsr", "csr"), ("csc", "bsr"), ("bsc", "coo")]


def sparse(*shape: int, seed: int = 0, density: float = 0.4) -> Any:
    """A dense matrix of zeros and numbers, with an empty row and an empty column."""
    generator = torch.Generator().manual_seed(seed)
    matrix = torch.randn(shape, dtype=torch.float64, generator=generator)
    matrix *= torch.rand(shape, generator=generator) < density
    matrix[shape[0] // 2] = 0
    matrix[:, 0] = 0
    return matrix


def laid_out(matrix: Any, layout: str) -> Any:
    if layout in BLOCKS:
        size = tuple(next(n for n in (3, 2, 1) if extent % n == 0) for extent in matrix.shape)
        return matrix.to_sparse(layout=BLOCKS[layout], blocksize=size)
    return matrix if layout == "dense" else matrix.to_sparse(layout=LAYOUTS[layout])


def assembled(like: Any, values: Any) -> Any:
    if like.layout is torch.strided:
        return values
    if like.layout is torch.sparse_coo:
        return torch.sparse_coo_tensor(like.indices(), values, like.shape)
    return Assembled.apply(like, values)


def values_of(matrix: Any) -> Any:
    if matrix.layout is torch.strided:
        return matrix.clone().requires_grad_()
    matrix = matrix.coalesce() if matrix.layout is torch.sparse_coo else matrix
    return matrix.values().clone().requires_grad_()


@pytest.mark.parametrize(("left", "right"), PAIRS)
def test_products_and_their_gradients(left, right):
    dense = sparse(4, 5), sparse(5, 3, seed=1, density=0.6)
    A, B = (laid_out(m, layout) for m, layout in zip(dense, (left, right), strict=True))
    A, B = (m.coalesce() if m.layout is torch.sparse_coo else m for m in (A, B))

    def values(a: Any, b: Any) -> Any:
        result = sparsetir.torch.matmul(assembled(A, a), assembled(B, b))
        return result if result.layout is torch.strided else ValuesFunction.apply(result)

    torch.testing.assert_close(sparsetir.torch.matmul(A, B).to_dense(), dense[0] @ dense[1])
    operands = values_of(A), values_of(B)
    assert torch.autograd.gradcheck(values, operands)
    if "coo" not in (left, right):  # torch's coalesce() has no second derivative
        assert torch.autograd.gradgradcheck(values, operands)


SIDES = [(left, right) for left, right in PAIRS if "dense" in (left, right) and not {left, right} & BLOCKS.keys()]


@pytest.mark.parametrize(("left", "right"), SIDES)
def test_products_by_bfloat16_numbers_and_their_gradients(left, right):
    """Each sum is off by at most 3 * 2**-16 times the sum of magnitudes; of gradients as well."""
    dense = sparse(24, 40), sparse(40, 17, seed=1, density=0.6)
    g = torch.randn(24, 17, dtype=torch.float64, generator=torch.Generator().manual_seed(2))

    def computed(dtype: Any, **options: Any) -> list[Any]:
        A, B = (laid_out(m.to(dtype), layout) for m, layout in zip(dense, (left, right), strict=True))
        A, B = (m.coalesce() if m.layout is torch.sparse_coo else m for m in (A, B))
        a, b = values_of(A), values_of(B)
        result = sparsetir.torch.matmul(assembled(A, a), assembled(B, b), **options)
        first = torch.autograd.grad(result, (a, b), g.to(dtype), create_graph=True)
        second = torch.autograd.grad(sum((part**2).sum() for part in first), (a, b)) if "coo" not in SET else ()
        return [result, *first, *second]

    SET = {left, right}
    exact, halves = computed(torch.float64), computed(torch.float32, precision="bf16x3")
    place = 1 if right == "dense" else 2  # of the sparse operand
    bound = [dense[0].abs() @ dense[1].abs(), dense[0].abs().t() @ g.abs(), g.abs() @ dense[1].abs().t()]
    assert ((halves[0] - exact[0]).abs() <= 3 * 2**-16 * bound[0] + 1e-6).all()
    for n, (matrix, layout) in enumerate(zip(dense, (left, right), strict=True), 1):
        limit = bound[3 - n]
        if n == place:
            limit = values_of(laid_out((limit + 1e-12) * (matrix != 0), layout)).detach()
        error = (halves[n] - exact[n]).abs()
        assert (error <= 3 * 2**-16 * limit + 1e-6).all()
        assert error.max() > 1e-7  # not float32
    for found, expected in zip(halves, exact, strict=True):
        assert torch.linalg.norm(found - expected) <= 1e-4 * torch.linalg.norm(expected)


def _matmul(x: Any) -> Any:
    return sparsetir.torch.matmul(sparse(24, 40).float().to_sparse_csr(), x, precision="bf16x3")


def _heads(x: Any) -> Any:
    graph = sparsetir.torch.Graph(sparse(24, 40).float())
    weight = torch.stack([graph.weight, -graph.weight], dim=1)
    return graph.spmm(torch.stack([x, x], dim=1), weight, "mean", precision="bf16x3")


def _linear(x: Any) -> Any:
    graph = sparsetir.torch.Graph(sparse(24, 40).float())
    return graph.linear(graph.weight, x.t(), precision="bf16x3")


@pytest.mark.optimised
@pytest.mark.parametrize(
    ("multiply", "mcpu"),
    [(_matmul, "znver4"), (_matmul, "sapphirerapids"), (_heads, "znver4"), (_linear, "znver4")],
)
def test_units_multiply_bfloat16_numbers(multiply, mcpu, monkeypatch):
    """All kernels of a product and of the gradient in the dense operand have the instruction."""
    machine, built = cpu_target({"kind": "llvm", "mcpu": mcpu}, "kernels"), []

    def in_asm(program: Any) -> Any:
        built.append(build(program, machine).source("asm"))
        return build(program)

    monkeypatch.setattr("sparsetir.torch.programs.build", in_asm)
    CACHES["kernels of graphs"].clear()
    multiply(torch.ones(40, 32, requires_grad=True)).sum().backward()
    CACHES["kernels of graphs"].clear()
    assert len(built) == 1  # of both directions
    assert "vdpbf16ps" in built[0]


def test_a_precision_of_another_product():
    A = sparse(4, 5).float().to_sparse_csr()
    for left, right in ((A.double(), torch.ones(5, 2).double()), (A, A.t().to_sparse_csr()), (A, torch.ones(5))):
        with pytest.raises(ArgumentError, match="precision: expected None"):
            sparsetir.torch.matmul(left, right, precision="bf16x3")
    with pytest.raises(ArgumentError, match="precision: expected None, or 'bf16x3'"):
        sparsetir.torch.matmul(A, torch.ones(5, 2), precision="bf16")


def test_a_missing_gradient_of_a_sparse_product_is_none():
    """Torch passes none where an output has no part in the loss, and looks for that in gradcheck."""
    A, B = (sparse(*shape, seed=seed).to_sparse_csr() for shape, seed in (((4, 5), 0), ((5, 3), 1)))
    operands = values_of(A), values_of(B)
    product = lambda a, b: sparsetir.torch.matmul(assembled(A, a), assembled(B, b)).values()  # noqa: E731
    assert torch.autograd.gradcheck(product, operands, check_undefined_grad=True)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("shapes", [(4, 5, 3), (1, 1, 1), (0, 3, 2), (3, 0, 2), (30, 40, 20)])
def test_gradients_of_leaves_have_their_pattern(dtype, index, shapes):
    m, p, n = shapes
    dense = [t.to(dtype) for t in (torch.randn(m, p) * (torch.rand(m, p) < 0.3), torch.randn(p, n))]
    dense[1] *= torch.rand(p, n) < 0.3
    A, B = (t.to_sparse_csr() for t in dense)
    A, B = (
        torch.sparse_csr_tensor(t.crow_indices().to(index), t.col_indices().to(index), t.values(), t.shape)
        for t in (A, B)
    )
    A.requires_grad_(), B.requires_grad_()
    for _ in range(2):  # gradients accumulate
        sparsetir.torch.matmul(A, B).to_dense().square().sum().backward()
    expected = [t.clone().requires_grad_() for t in dense]
    (2 * (expected[0] @ expected[1]).square().sum()).backward()
    for matrix, plain in zip((A, B), expected, strict=True):
        assert matrix.grad.layout is torch.sparse_csr
        assert torch.equal(matrix.grad.col_indices(), matrix.col_indices())
        torch.testing.assert_close(matrix.grad.values(), plain.grad[plain != 0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("size", [(1, 1), (2, 3), (4, 6)])
def test_gradients_of_blocks_have_all_their_entries(size, index):
    """Values that require grad, put into a tensor of blocks by torch, and leaves that torch cannot give gradients."""
    blocks = torch.zeros(4, 6, dtype=torch.float64)
    blocks[: size[0], -size[1] :] = 1
    A = blocks.to_sparse_bsr(size)
    pointers, columns = A.crow_indices().to(index), A.col_indices().to(index)
    values = torch.randn(A.values().shape, dtype=torch.float64, requires_grad=True)
    X = torch.randn(6, 2, dtype=torch.float64, requires_grad=True)
    y = sparsetir.torch.matmul(torch.sparse_bsr_tensor(pointers, columns, values, (4, 6)), X)
    dense = torch.sparse_bsr_tensor(pointers, columns, values.detach(), (4, 6)).to_dense().requires_grad_()
    expected = dense @ X
    torch.testing.assert_close(y, expected)
    g = torch.randn_like(y)
    found, wanted = torch.autograd.grad(y, (values, X), g), torch.autograd.grad(expected, (dense, X), g)
    torch.testing.assert_close(found[1], wanted[1])
    torch.testing.assert_close(found[0].reshape(size), wanted[0][: size[0], -size[1] :])
    for layout in ("bsr", "bsc", "csc"):
        leaf = laid_out(torch.ones(4, 6), layout).requires_grad_()
        with pytest.raises(ArgumentTypeError, match=f"A: expected .*, got a leaf of layout {layout.upper()}"):
            sparsetir.torch.matmul(leaf, torch.ones(6, 2))
    broken = torch.sparse_bsr_tensor(pointers, columns + 6, values.detach(), (4, 6), check_invariants=False)
    with pytest.raises(StructureError, match="A: expected indices in"):
        sparsetir.torch.matmul(broken, X)


def test_values_and_index_arrays_that_change():
    A = sparse(6, 6).to_sparse_csr()
    x = torch.randn(6, 2, dtype=torch.float64)
    torch.testing.assert_close(sparsetir.torch.matmul(A, x), A.to_dense() @ x)
    A.values().mul_(3)
    torch.testing.assert_close(sparsetir.torch.matmul(A, x), A.to_dense() @ x)
    first = A.crow_indices().numpy()
    row = int((first[1:] - first[:-1] > 0).argmax())
    A.col_indices()[first[row] : first[row + 1]] = torch.arange(first[row + 1] - first[row])
    torch.testing.assert_close(sparsetir.torch.matmul(A, x), A.to_dense() @ x)


def test_vectors_and_halves():
    A = sparse(5, 4).float().to_sparse_csr().requires_grad_()
    x = torch.randn(4, requires_grad=True)
    y = sparsetir.torch.matmul(A, x)
    y.sum().backward()
    torch.testing.assert_close(y, A.detach().to_dense() @ x)
    torch.testing.assert_close(x.grad, A.detach().to_dense().sum(0))
    half = sparsetir.torch.matmul(A.detach().bfloat16(), x.detach()[:, None].bfloat16())
    torch.testing.assert_close(half.float()[:, 0], y.detach(), rtol=0.05, atol=0.05)


CSR = torch.eye(3).to_sparse_csr()
UNSORTED = torch.sparse_csr_tensor(
    torch.tensor([0, 2]), torch.tensor([1, 0]), torch.ones(2), (1, 2), check_invariants=False
)
OUTSIDE = torch.sparse_csr_tensor(
    torch.tensor([0, 1]), torch.tensor([5]), torch.ones(1), (1, 2), check_invariants=False
)
POINTERS = torch.sparse_csr_tensor(
    torch.tensor([0, 2, 1]), torch.tensor([0]), torch.ones(1), (2, 2), check_invariants=False
)


@pytest.mark.parametrize(
    ("A", "B", "error", "message"),
    [
        (CSR, [1.0], ArgumentTypeError, "B: expected a torch tensor, got list"),
        (torch.eye(3), torch.eye(3), ArgumentTypeError, "A, B: expected a sparse operand, got two dense ones"),
        (CSR, torch.eye(3).double(), ArgumentTypeError, "B: expected the dtype of A"),
        (CSR, torch.eye(4), ArgumentError, "B: expected 3 rows, got the shape"),
        (CSR, torch.ones(3, 1, 1), ArgumentError, "B: expected a matrix, got the shape"),
        (torch.ones(3), CSR, ArgumentError, "A: expected a matrix, got the shape"),
        (CSR.to(torch.int32), torch.eye(3), ArgumentTypeError, "A: expected floats in CSR, CSC, BSR, BSC, COO or"),
        (CSR.half(), CSR.half(), ArgumentTypeError, "A: expected float32 or float64, got torch.float16"),
        (
            torch.eye(3).to_sparse_csc().requires_grad_(),
            CSR,
            ArgumentTypeError,
            "A: expected .* got a leaf of layout CSC",
        ),
        (UNSORTED, torch.eye(2), StructureError, "A: expected sorted and distinct indices in each row"),
        (OUTSIDE, torch.eye(2), StructureError, r"A: expected indices in \[0, 2\)"),
        (POINTERS, torch.eye(2), StructureError, "A: expected row pointers that rise from 0 to 1"),
    ],
)
def test_wrong_operands(A, B, error, message):
    with pytest.raises(error, match=message):
        sparsetir.torch.matmul(A, B)


def test_one_gradient_at_a_time():
    A = CSR.clone().requires_grad_()
    y = sparsetir.torch.matmul(A, torch.eye(3))
    with pytest.raises(LoweringError, match="for one gradient at a time"):
        torch.autograd.grad(y, A, torch.ones(2, 3, 3), is_grads_batched=True)
