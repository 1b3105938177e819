# SPDX-License-Identifier: Apache-2.0
"""A mixture-of-experts layer in three ways: as a program of the dialect, in torch with gradients, and in Relax.

Each token goes to two experts, small networks of two layers. Tokens are sorted by expert; the rows of an expert are
then a ragged group, which a `T.dense_variable` axis describes. Nothing is padded. The sum over the experts of a token
is a product with a sparse matrix of gates.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse as sp
from tvm import relax, tirx
from tvm.relax.frontend import nn
from tvm.relax.frontend.nn.core import wrap_nested

import sparsetir
import sparsetir.relax
from sparsetir import T

try:
    import torch
    from sparsetir.torch import grouped_mm
except ImportError:
    torch = None

TOKENS, EXPERTS, CHOICES, DEPTH, HIDDEN = 512, 16, 2, 64, 128


# ------------------------------------------------------------------ the dialect


def experts_program(tokens: int, experts: int, slots: int, depth: int, hidden: int) -> tirx.PrimFunc:
    """Return the program of all experts, whose rows read their tokens and stay in the order of experts."""

    @T.prim_func
    def mixture(x: T.handle, up: T.handle, down: T.handle, offsets: T.handle, token: T.handle, y: T.handle):
        T.func_attr({"op_pattern": 8})  # for Relax: nothing is to be fused with it
        E = T.dense_fixed(experts)
        R = T.dense_variable(E, (slots, slots), offsets)
        N = T.dense_fixed(tokens)
        D = T.dense_fixed(depth)
        F = T.dense_fixed(hidden)
        X = T.match_sparse_buffer(x, (N, D), "float32")
        UP = T.match_sparse_buffer(up, (E, D, F), "float32")
        DOWN = T.match_sparse_buffer(down, (E, F, D), "float32")
        TOKEN = T.match_sparse_buffer(token, (E, R), "int32")
        Y = T.match_sparse_buffer(y, (E, R, D), "float32")
        H = T.alloc_sparse_buffer((E, R, F), "float32")
        with T.sp_iter([E, R, D, F], "SSRS", "up") as [e, r, d, f]:
            with T.init():
                H[e, r, f] = 0
            H[e, r, f] = H[e, r, f] + X[TOKEN[e, r], d] * UP[e, d, f]
        with T.sp_iter([E, R, F], "SSS", "relu") as [e, r, f]:
            H[e, r, f] = T.max(H[e, r, f], T.float32(0))
        with T.sp_iter([E, R, F, D], "SSRS", "down") as [e, r, f, d]:
            with T.init():
                Y[e, r, d] = 0
            Y[e, r, d] = Y[e, r, d] + H[e, r, f] * DOWN[e, f, d]

    return mixture


class Routing(NamedTuple):
    """Which rows go to which expert.

    Attributes
    ----------
    gates : ndarray
        [tokens, choices], the weights of the experts of each token.
    token : ndarray
        The token of each row, rows sorted by expert.
    offsets : ndarray
        Where the rows of each expert begin, and the number of rows.
    place : ndarray
        [tokens, choices], the row of each choice.
    """

    gates: np.ndarray
    token: np.ndarray
    offsets: np.ndarray
    place: np.ndarray


def route(x: np.ndarray, router: np.ndarray, choices: int) -> Routing:
    """Choose the experts of each token."""
    scores = x @ router
    expert = np.argsort(-scores, axis=1)[:, :choices]
    chosen = np.exp(np.take_along_axis(scores, expert, axis=1))
    order = np.argsort(expert, axis=None, kind="stable")
    offsets = np.concatenate([[0], np.cumsum(np.bincount(expert.ravel(), minlength=router.shape[1]))])
    place = np.empty(order.size, np.int32)
    place[order] = np.arange(order.size)
    gates = (chosen / chosen.sum(1, keepdims=True)).astype(np.float32)
    return Routing(gates, (order // choices).astype(np.int32), offsets.astype(np.int32), place.reshape(expert.shape))


def by_dialect(kernel: Any, x: np.ndarray, up: np.ndarray, down: np.ndarray, routing: Routing) -> np.ndarray:
    """Compute the layer with a compiled program and a sparse product."""
    rows = kernel(X=x, UP=up, DOWN=down, offsets=routing.offsets, TOKEN=routing.token)
    tokens, choices = routing.gates.shape
    starts = np.arange(0, tokens * choices + 1, choices, dtype=np.int32)
    parts = (routing.gates.ravel(), routing.place.ravel(), starts)
    return np.asarray(sparsetir.matmul(sp.csr_array(parts, shape=(tokens, rows.shape[0])), rows))


# ------------------------------------------------------------------ torch


def torch_layer(product: Callable[..., Any], x: Any, router: Any, up: Any, down: Any, choices: int) -> Any:
    """Compute the layer with a grouped product of ``(rows, matrices, offs=ends)``."""
    chosen, expert = (x @ router).topk(choices, dim=1)
    order = expert.flatten().argsort(stable=True)
    ends = torch.bincount(expert.flatten(), minlength=up.shape[0]).cumsum(0).int()
    hidden = product(x[order // choices], up, offs=ends).relu()
    rows = product(hidden, down, offs=ends)
    place = torch.empty_like(order)
    place[order] = torch.arange(order.numel())
    return (chosen.softmax(1)[..., None] * rows[place.view_as(expert)]).sum(1)


def loop(rows: Any, matrices: Any, *, offs: Any) -> Any:
    """Multiply one group after the other."""
    parts = rows.tensor_split(offs[:-1].tolist())
    return torch.cat([part @ matrix for part, matrix in zip(parts, matrices, strict=True)])


def padded(rows: Any, matrices: Any, *, offs: Any) -> Any:
    """Multiply groups that are padded to the longest one."""
    lengths = torch.diff(offs, prepend=offs.new_zeros(1))
    is_there = torch.arange(int(lengths.max())) < lengths[:, None]
    wide = rows.new_zeros(*is_there.shape, rows.shape[1])
    wide[is_there] = rows
    return torch.bmm(wide, matrices)[is_there]


# ------------------------------------------------------------------ Relax


class MixtureOfExperts(nn.Module):
    """The layer as a module of `tvm.relax.frontend.nn`, routing included."""

    def __init__(self, experts: int, choices: int, depth: int, hidden: int) -> None:
        super().__init__()
        self.sizes = experts, choices, depth, hidden
        self.router = nn.Parameter((depth, experts), "float32")
        self.up = nn.Parameter((experts, depth, hidden), "float32")
        self.down = nn.Parameter((experts, hidden, depth), "float32")

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        """Apply the layer to tokens [tokens, depth]."""
        experts, choices, depth, hidden = self.sizes
        tokens = int(x.shape[0])
        slots = tokens * choices
        op = relax.op
        constant = sparsetir.relax.operators.constant
        emit = lambda value: wrap_nested(value, "step")._expr  # noqa: E731
        scores = nn.op.matmul(x, self.router)._expr
        chosen, expert = wrap_nested(op.topk(scores, k=choices, axis=1, ret_type="both", dtype="int32"), "chosen")
        gates = emit(op.nn.softmax(chosen._expr, axis=1))
        expert = emit(op.reshape(expert._expr, [slots]))
        order = emit(op.argsort(expert, dtype="int32"))
        place = emit(op.argsort(order, dtype="int32"))
        token = emit(op.floor_divide(order, relax.const(choices, "int32")))
        is_before = emit(op.less(emit(op.reshape(expert, [slots, 1])), constant(np.arange(experts + 1, dtype="int32"))))
        offsets = emit(op.sum(emit(op.astype(is_before, "int32")), axis=0))
        program = experts_program(tokens, experts, slots, depth, hidden)
        operands = [x, self.up, self.down, *(nn.Tensor(_expr=value) for value in (offsets, token))]
        rows = nn.op.tensor_ir_op(program, "mixture", operands, nn.Tensor.placeholder((slots, depth), "float32"))
        starts = constant(np.arange(0, slots + 1, choices, dtype="int32"))
        mixed = sparsetir.relax.spmm(emit(op.reshape(gates, [slots])), starts, place, rows._expr)
        return wrap_nested(mixed, "mixed")


def compiled(weights: dict[str, np.ndarray], tokens: int, choices: int) -> Callable[[np.ndarray], np.ndarray]:
    """Return the module with these weights, exported to Relax and compiled."""
    experts, depth, hidden = weights["up"].shape
    layer = MixtureOfExperts(experts, choices, depth, hidden)
    module, _ = layer.export_tvm({"forward": {"x": nn.spec.Tensor([tokens, depth], "float32")}})
    return sparsetir.relax.compile_model(module, params=weights)


# ------------------------------------------------------------------ all of them


def milliseconds(calls: dict[str, Callable[[], Any]], rounds: int = 10) -> dict[str, float]:
    """Return the least time of each call, timed in turns."""
    least = dict.fromkeys(calls, float("inf"))
    for call in calls.values():
        call()
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            least[name] = min(least[name], (time.perf_counter() - start) * 1e3)
    return least


def torch_calls(x: np.ndarray, weights: dict[str, np.ndarray], expected: np.ndarray) -> dict[str, Callable[[], Any]]:
    """Return the ways in torch, after a check of their results and of the gradients of ours."""
    products = {"torch, loop": loop, "torch, padded bmm": padded, "torch.nn.functional": torch.nn.functional.grouped_mm}
    products["sparsetir.torch.grouped_mm"] = grouped_mm
    operands = [torch.from_numpy(a) for a in (x, *weights.values())]
    gradients = {}
    for name, product in products.items():
        leaves = [t.clone().requires_grad_() for t in operands]
        y = torch_layer(product, *leaves, CHOICES)
        np.testing.assert_allclose(y.detach(), expected, rtol=1e-3, atol=1e-4)
        gradients[name] = torch.autograd.grad(y.square().sum(), leaves)
    for one, other in zip(gradients["torch, loop"], gradients["sparsetir.torch.grouped_mm"], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)
    call = torch.no_grad()(torch_layer)
    return {name: lambda product=product: call(product, *operands, CHOICES) for name, product in products.items()}


def main() -> None:
    """Compute one layer in all ways, compare the results, and print the times."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.standard_normal(shape, dtype=np.float32) / np.float32(shape[-2]) ** 0.5  # noqa: E731
    x = rng.standard_normal((TOKENS, DEPTH), dtype=np.float32)
    weights = {"router": draw(DEPTH, EXPERTS), "up": draw(EXPERTS, DEPTH, HIDDEN), "down": draw(EXPERTS, HIDDEN, DEPTH)}

    kernel = sparsetir.build(experts_program(TOKENS, EXPERTS, TOKENS * CHOICES, DEPTH, HIDDEN))
    dialect = lambda: by_dialect(kernel, x, weights["up"], weights["down"], route(x, weights["router"], CHOICES))  # noqa: E731
    y = dialect()
    model = compiled(weights, TOKENS, CHOICES)
    np.testing.assert_allclose(model(x), y, rtol=1e-3, atol=1e-4)
    calls = {"the dialect": dialect, "Relax": lambda: model(x)}
    if torch is not None:
        calls |= torch_calls(x, weights, y)

    shown = ("for ", "with T.sblock")
    print("\n".join(line for line in kernel.script(stage=2).splitlines() if line.lstrip().startswith(shown)))
    print(f"{TOKENS} tokens, {CHOICES} of {EXPERTS} experts each, {DEPTH} features, {HIDDEN} hidden ones:")
    for name, least in milliseconds(calls).items():
        print(f"{name:>28} {least:7.2f} ms")


if __name__ == "__main__":
    main()
