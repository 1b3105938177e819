# SPDX-License-Identifier: Apache-2.0
"""Operators of `sparsetir.torch`: values and gradients, compared with gathers and scatters of torch in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from random import Random
from typing import Any

import numpy as np

from fuzzing.case import Case, CodeCase, CodeFront, Expected
from fuzzing.values import Value, dense_value, sparse_value

try:
    import torch
except ImportError:  # an extra
    torch = None  # type: ignore[assignment]

SLACK = {"float32": 2e-5, "float64": 1e-11, "float16": 2e-2, "bfloat16": 1.5e-1}
SOURCES = ("csr_array", "coo_array", "edge_index", "torch_coo", "torch_csr")
REDUCE = ("sum", "mean", "max", "min")
INPUTS = 16
#: operator -> its operands: letters of their sizes, e for edges
OPERANDS: dict[str, dict[str, str]] = {
    "spmm": {"x": "sf"},
    "spmm_weight": {"x": "sf", "w": "e"},
    "spmm_heads": {"x": "shf", "w": "eh"},
    "spmm_bias": {"x": "sf", "b": "f"},
    "sddmm": {"q": "tf", "k": "sf"},
    "sddmm_heads": {"q": "thf", "k": "shf"},
    "edge_sum": {"a": "t", "c": "s"},
    "softmax": {"w": "e"},
    "softmax_heads": {"w": "eh"},
    "attention": {"q": "tf", "k": "sf", "v": "sg"},
    "attention_heads": {"q": "thf", "k": "shf", "v": "shg"},
    "additive_attention": {"a": "t", "c": "s", "v": "sg"},
    "conv": {"x": "sf", "u": "gf", "b": "g"},
}
CALLS = {
    "spmm": "graph.spmm(x, reduce={reduce!r})",
    "spmm_weight": "graph.spmm(x, w, {reduce!r})",
    "spmm_heads": "graph.spmm(x, w, {reduce!r})",
    "spmm_bias": "graph.spmm(x, reduce={reduce!r}, bias=b, activation={activation!r})",
    "sddmm": "graph.sddmm(q, k)",
    "sddmm_heads": "graph.sddmm(q, k)",
    "edge_sum": "graph.edge_sum(a, c)",
    "softmax": "graph.softmax(w)",
    "softmax_heads": "graph.softmax(w)",
    "attention": "graph.attention(q, k, v)",
    "attention_heads": "graph.attention(q, k, v)",
    "additive_attention": "graph.additive_attention(a, c, v)",
    "conv": "graph.conv(x, u, b, {reduce!r}, {activation!r})",
}


class TorchOperators(CodeFront):
    """`sparsetir.torch.Graph`: results and gradients in one array."""

    name, groups = "torch", 1

    def draw(self, rng: Random) -> Iterator[Case]:
        if torch is None:
            return
        op, dtype = (
            rng.choice(list(CALLS)),
            rng.choice(["float32", "float32", "float64", "float64", "float16", "bfloat16"]),
        )
        source = rng.choice(SOURCES)
        gradients = rng.random() < 0.7 and dtype.startswith("float") and dtype != "float16"
        facts = {
            "op": op,
            "reduce": rng.choice(REDUCE),
            "activation": rng.choice([None, None, "relu"]),
            "source": source,
        }
        for _ in range(INPUTS):
            sizes = {c: rng.choice([1, 2, 3, 4, 5, 6, 0]) for c in "tsfgh"}
            sizes |= {"h": rng.choice([1, 2, 3]), "f": max(1, sizes["f"]), "g": max(1, sizes["g"])}
            kind = "coo_array" if source == "edge_index" else source
            kind = "CooTensor" if dtype in ("float16", "bfloat16") else kind
            style = rng.choice(["whole", "real"])
            graph = sparse_value(rng, "ts", sizes, dtype, style, (kind,), repeats=source == "edge_index")
            values = {"G": graph}
            may_be_special = facts["reduce"] in ("sum", "mean") and facts["activation"] is None
            for name, own in OPERANDS[op].items():
                if "e" not in own:
                    odd = "special" if name == "x" and may_be_special and rng.random() < 0.25 else "real"
                    values[name] = dense_value(rng, own, sizes, dtype, odd, ("torch",))
            yield CodeCase(self, values, {**facts, "gradients": gradients, "heads": sizes["h"]})

    def code(self, case: CodeCase) -> list[str]:
        facts, dtype = case.facts, case.values["G"].dtype
        lines = ["import torch, sparsetir.torch"]
        if case.values["G"].kind == "CooTensor" or facts["source"] == "edge_index":
            coords, shape = "G.coords", "(G.shape[1], G.shape[0])"
            lines += [f"edges = torch.from_numpy(np.array({coords})[::-1].astype('int64').copy())"]
            lines += [f"graph = sparsetir.torch.Graph(edges, {shape})"]
        else:
            lines += ["graph = sparsetir.torch.Graph(G)"]
        for name, own in OPERANDS[facts["op"]].items():
            if own[0] == "e":
                shape = f"(graph.num_edges, {facts['heads']})" if "h" in own else "graph.num_edges"
                drawn = f"np.random.default_rng(5).standard_normal({shape})"
                lines += [f"{name} = torch.from_numpy({drawn}).to(torch.{dtype})"]
        names = list(OPERANDS[facts["op"]])
        if facts["gradients"]:
            lines += [f"for operand in ({', '.join(names)},):", "    operand.requires_grad_()"]
        lines += [f"y = {CALLS[facts['op']].format(**facts)}"]
        if not facts["gradients"]:
            return [*lines, "got = y.detach()"]
        lines += [
            "pull = torch.from_numpy(np.random.default_rng(6).standard_normal(tuple(y.shape))).to(y.dtype)",
            f"found = torch.autograd.grad(y, [{', '.join(names)}], pull, allow_unused=True)",
            f"found = [torch.zeros_like(o) if g is None else g for g, o in zip(found, [{', '.join(names)}])]",
            "got = torch.cat([part.detach().reshape(-1) for part in (y, *found)])",
        ]
        return lines

    def expected(self, case: CodeCase) -> Expected | None:
        graph, facts = case.values["G"], case.facts
        dtype = graph.dtype
        assert graph.coords is not None
        rows, columns, weight = (torch.from_numpy(np.array(a)) for a in edges_of(graph, facts["source"]))
        tensors: dict[str, Any] = {}
        for name, own in OPERANDS[facts["op"]].items():
            if own[0] == "e":
                shape = (len(rows), facts["heads"]) if "h" in own else (len(rows),)
                drawn = np.random.default_rng(5).standard_normal(shape)
                tensors[name] = torch.from_numpy(drawn).to(getattr(torch, dtype)).double()
            else:
                tensors[name] = torch.from_numpy(case.values[name].data.astype(np.float64))
        for tensor in tensors.values():
            tensor.requires_grad_(facts["gradients"])
        has_weight = not (facts["source"] == "edge_index" or graph.kind == "CooTensor")
        place = Edges(rows, columns, weight.double() if has_weight else None, graph.shape)
        y = place.result(facts, tensors)
        parts = [y.detach()]
        if facts["gradients"]:
            pull = torch.from_numpy(np.random.default_rng(6).standard_normal(tuple(y.shape)))
            pull = pull.to(getattr(torch, dtype)).double()
            if not y.requires_grad:  # without edges
                y = y + sum(t.sum() for t in tensors.values()) * 0
            found = torch.autograd.grad(y, list(tensors.values()), pull, allow_unused=True)
            parts += [torch.zeros_like(t) if g is None else g for g, t in zip(found, tensors.values(), strict=True)]
            want = torch.cat([part.reshape(-1) for part in parts]).numpy()
        else:
            want = parts[0].numpy()
        size = np.nan_to_num(np.abs(want), posinf=0)
        return Expected(want, SLACK[dtype] * (1 + size + size.max(initial=0)))

    def simpler(self, case: CodeCase) -> Iterator[Mapping[str, Any]]:
        facts = case.facts
        for name, simple in (("gradients", False), ("activation", None), ("reduce", "sum")):
            if facts[name] != simple:
                yield {**facts, name: simple}

    def label(self, case: CodeCase) -> str:
        facts = case.facts
        reduce = facts["reduce"] if "{reduce" in CALLS[facts["op"]] else ""
        return f"{facts['op']} {reduce} {case.values['G'].dtype} {'with gradients' * facts['gradients']}"


def edges_of(graph: Value, source: str) -> tuple[Any, ...]:
    """Targets, sources and weights in the order in which the graph is given."""
    assert graph.coords is not None
    rows, columns = graph.coords
    data = graph.data.astype(np.float64)
    if "csr" in graph.kind:
        key = (columns, rows) if graph.kind == "torch_csr" else (rows,)
        order = np.lexsort(key)
        return rows[order], columns[order], data[order]
    return rows, columns, data


class Edges:
    """The operators by gathers and scatters."""

    def __init__(self, rows: Any, columns: Any, weight: Any, shape: tuple[int, ...]) -> None:
        self.rows, self.columns, self.weight, self.shape = rows, columns, weight, shape

    def result(self, facts: Mapping[str, Any], tensors: dict[str, Any]) -> Any:
        op = facts["op"].removesuffix("_heads")
        made: Callable[..., Any] = getattr(self, op)
        return made(facts, **tensors)

    def summed(self, edges: Any) -> Any:
        made = torch.zeros((self.shape[0], *edges.shape[1:]), dtype=torch.float64)
        return made.index_add(0, self.rows, edges)

    def reduced(self, reduce: str, edges: Any) -> Any:
        """Reduce over the edges of each target; zero where there are none."""
        if reduce in ("sum", "mean"):
            total = self.summed(edges)
            count = self.summed(torch.ones(len(edges), dtype=torch.float64)).clamp(min=1)
            return total / count.reshape(-1, *[1] * (edges.dim() - 1)) if reduce == "mean" else total
        choose = torch.amax if reduce == "max" else torch.amin
        rows = [choose(edges[self.rows == r], 0) if (self.rows == r).any() else edges.new_zeros(edges.shape[1:])
                for r in range(self.shape[0])]  # fmt: skip
        return torch.stack(rows) if rows else edges.new_zeros((0, *edges.shape[1:]))

    def spmm(self, facts: Mapping[str, Any], x: Any, w: Any = None, b: Any = None) -> Any:
        weight = self.weight if w is None else w
        edges = x[self.columns]
        if weight is not None:
            edges = edges * weight.reshape(*weight.shape, *[1] * (edges.dim() - weight.dim()))
        y = self.reduced(facts["reduce"], edges)
        y = y if b is None else y + b
        return y.relu() if b is not None and facts["activation"] else y

    def spmm_weight(self, facts: Mapping[str, Any], x: Any, w: Any) -> Any:
        return self.spmm(facts, x, w)

    def spmm_bias(self, facts: Mapping[str, Any], x: Any, b: Any) -> Any:
        return self.spmm(facts, x, None, b)

    def conv(self, facts: Mapping[str, Any], x: Any, u: Any, b: Any) -> Any:
        facts_of_sums = {**facts, "activation": None}
        if facts["reduce"] in ("sum", "mean") and x.shape[1] >= u.shape[0]:
            # The sums are over what is narrower; the order decides whether a gradient is infinite or NaN.
            read, columns = torch.unique(self.columns, return_inverse=True)
            narrow = Edges(self.rows, columns, self.weight, self.shape)
            y = narrow.spmm(facts_of_sums, x[read] @ u.T) + b
        else:
            y = self.spmm(facts_of_sums, x) @ u.T + b
        return y.relu() if facts["activation"] else y

    def sddmm(self, facts: Mapping[str, Any], q: Any, k: Any) -> Any:
        return (q[self.rows] * k[self.columns]).sum(-1)

    def edge_sum(self, facts: Mapping[str, Any], a: Any, c: Any) -> Any:
        return a[self.rows] + c[self.columns]

    def softmax(self, facts: Mapping[str, Any], w: Any) -> Any:
        if not len(w):
            return w * 1
        powers = (w - w.detach().amax()).exp()
        return powers / self.summed(powers)[self.rows]

    def attention(self, facts: Mapping[str, Any], q: Any, k: Any, v: Any) -> Any:
        shares = self.softmax(facts, self.sddmm(facts, q, k) * q.shape[-1] ** -0.5)
        return self.summed(shares[..., None] * v[self.columns])

    def additive_attention(self, facts: Mapping[str, Any], a: Any, c: Any, v: Any) -> Any:
        scores = torch.nn.functional.leaky_relu(self.edge_sum(facts, a, c), 0.2)
        return self.summed(self.softmax(facts, scores)[..., None] * v[self.columns])


__all__ = ["TorchOperators"]
