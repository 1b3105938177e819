# SPDX-License-Identifier: Apache-2.0
"""Backend of ``torch.compile(model, backend="sparsetir")``: edge operators run on kernels, the rest in torch."""

from __future__ import annotations

import importlib
import math
import operator
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from sparsetir.errors import ArgumentError
from sparsetir.torch import graph_caches, tracing
from sparsetir.torch.fx_patterns import Messages, value
from sparsetir.torch.graph_caches import INTEGERS
from sparsetir.torch.sparsify import SparsifyOptions, choose_linear_layers, options_of

DENSE = ("eager", "aot_eager", "inductor")


def compile_graph(
    module: torch.fx.GraphModule, inputs: Any, *, options: Mapping[str, Any] | None = None, mode: str | None = None
) -> Callable[..., Any]:
    """Compile a traced program: the `torch.compile` backend that pyproject.toml registers.

    Parameters
    ----------
    module : torch.fx.GraphModule
        What torch traced; changed in place.
    inputs : list of Tensor
    options : dict, optional
        `dense` is what runs the rest: "eager" (the default), "aot_eager", or "inductor". `sparsify` makes linear
        layers sparse where that is faster, in calls without gradients: True, or the lowest precision, "bfloat16".
        It takes weights as constant until they change in place, times each layer in its first call, and needs
        ``dense="eager"``.
    mode : str, optional
        None: there are no modes.

    Returns
    -------
    callable
        Of the inputs. Gradients are those of the operators.

    Raises
    ------
    ArgumentError
        Other options, or a mode.
    """
    dense, choice = _checked(dict(options or {}), mode)
    if choice is not None:
        choose_linear_layers(module, choice)
    plain = _copy(module) if dense == "eager" else None
    messages = Messages(module)
    messages.replace()
    _warn(messages.left())
    edges = _edge_inputs(module)
    if plain is not None:
        _call_directly(module)
    module.recompile()
    if plain is not None:
        return _choose_by_edges(module, plain, edges) if edges else module.forward
    from torch._dynamo.backends.registry import lookup_backend

    return lookup_backend(dense)(module, inputs)


def _checked(options: dict[str, Any], mode: str | None) -> tuple[str, SparsifyOptions | None]:
    if mode is not None:
        raise ArgumentError(f"the backend sparsetir has no modes, got mode={mode!r}: leave it out, or pass options")
    dense, sparsify = options.pop("dense", "eager"), options.pop("sparsify", False)
    if options or dense not in DENSE:
        description = f"dense={dense!r}" if dense not in DENSE else ", ".join(options)
        expected = f'"dense": one of {", ".join(map(repr, DENSE))}, "sparsify": True or a dtype'
        raise ArgumentError(f"options are {{{expected}}}, got {description}")
    if sparsify is False:
        return str(dense), None
    if dense != "eager" or sparsify not in (True, "float32", "bfloat16"):
        description = f"sparsify={sparsify!r} with dense={dense!r}"
        raise ArgumentError(
            f"options: expected sparsify to be True or 'bfloat16', with dense='eager', got {description}."
        )
    return "eager", options_of(None if sparsify is True else sparsify, 1, None, 100.0, 0.1, None)


def _copy(module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Copy a program, but not its parameters."""
    graph = torch.fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    return torch.fx.GraphModule(module, graph)


def _edge_inputs(module: torch.fx.GraphModule) -> dict[int, tuple[int, int]]:
    """Return the inputs that edges are computed from: their places, how many calls use each, and the most features."""
    nodes = [node for node in module.graph.nodes if node.op == "placeholder"]
    inputs: dict[int, tuple[int, int]] = {}
    for node in module.graph.nodes:
        if node.op != "call_function" or node.target is not tracing.along_edges:
            continue
        shape = value(node).shape[1:] if value(node) is not None else ()
        features = math.prod(size for size in shape if isinstance(size, int))
        for origin in _origins([edge for edge in node.args[:2] if isinstance(edge, torch.fx.Node)]):
            calls, most = inputs.get(nodes.index(origin), (0, 0))
            inputs[nodes.index(origin)] = calls + 1, max(most, features)
    return inputs


def _origins(nodes: list[torch.fx.Node]) -> list[torch.fx.Node]:
    """Return the inputs of integers that values are computed from."""
    visited: dict[torch.fx.Node, None] = {}
    while nodes:
        node = nodes.pop()
        if node not in visited:
            visited[node] = None
            nodes += node.all_input_nodes
    return [node for node in visited if node.op == "placeholder" and _is_edges(value(node))]


def _is_edges(tensor: Any) -> bool:
    return isinstance(tensor, torch.Tensor) and tensor.dim() > 0 and tensor.dtype in INTEGERS


def _choose_by_edges(
    module: torch.fx.GraphModule, plain: torch.fx.GraphModule, edges: dict[int, tuple[int, int]]
) -> Callable[..., Any]:
    """Run a program along structures where the edges are worth these, and otherwise as torch traced it."""
    _call_directly(plain)
    plain.recompile()
    along, as_traced = module.forward, plain.forward

    def run(*inputs: Any) -> Any:
        is_much, are_worth = False, True
        for place, (calls, features) in edges.items():
            is_much = is_much or graph_caches.is_much(inputs[place], features)
            are_worth = tracing.GRAPHS.is_worth(inputs[place], features, calls) and are_worth
        return along(*inputs) if is_much or are_worth else as_traced(*inputs)

    return run


def _call_directly(module: torch.fx.GraphModule) -> None:
    """Spare the calls of graphs the way through torch's dispatcher."""
    for node in module.graph.nodes:
        if node.op == "call_function" and node.target in (_ALONG_ROWS, _ALONG_ROWS.default):
            node.target = tracing.along_rows
        if node.op == "call_function" and node.target is tracing.along_edges:
            _take_whole(node)


def _take_whole(node: torch.fx.Node) -> None:
    """Spare a call taking the rows out of an edge index, by which its graph is not known better."""
    rows = node.args[:2]
    if not all(isinstance(row, torch.fx.Node) and row.target is operator.getitem for row in rows):
        return
    (whole, target), (other, source) = (row.args for row in rows)
    is_matrix = isinstance(whole, torch.fx.Node) and value(whole) is not None and value(whole).dim() == 2
    if whole is not other or not is_matrix or not all(isinstance(i, int) for i in (target, source)):
        return
    node.target, node.args = tracing.along_index, (whole, (target, source), *node.args[2:])
    for row in rows:
        if not row.users:
            node.graph.erase_node(row)


_ALONG_ROWS = torch.ops.sparsetir.along_rows


def _warn(names: list[str]) -> None:
    """Warn of operators that are left to torch, when a function is compiled for the first time."""
    compiled = importlib.import_module("torch._guards").CompileContext.current_compile_id()
    if not names or (compiled is not None and compiled.frame_compile_id):
        return
    supported = "sums, means, maxima and minima of rows, into zeros"
    warnings.warn(f"torch runs {', '.join(names)} as before: the kernels of sparsetir are {supported}", stacklevel=2)


__all__ = ["compile_graph"]
