# SPDX-License-Identifier: Apache-2.0
"""Choice between dense and sparse, and between dtypes, by measurement: of pruned layers, and at first calls."""

from __future__ import annotations

import dataclasses
import math
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from torch.nn import functional
from torch.nn.utils import parametrize
from torch.nn.utils.prune import BasePruningMethod

import torch
from sparsetir.errors import ArgumentError, ArgumentTypeError, SparseTIRError
from sparsetir.torch.pruned_layers import (
    CONVOLUTION_OPTIONS,
    INT8_MAX,
    PRECISION,
    SPARSE,
    PrunedAttention,
    PrunedConv,
    PrunedLinear,
    PrunedWeight,
    Weight,
    dtype_name,
    matrix_of,
    ways,
)
from sparsetir.utils.arguments import shown
from sparsetir.workloads.choice import LEAST_SIZE, MOST_DENSE, Choice, choose, timer_of
from torch import Tensor, nn

# The greatest error of a candidate relative to the layer, by the norms of the outputs.
TOLERANCES = {"float64": 1e-8, "float32": 1e-3, "float16": 2e-2, "bfloat16": 2e-2, "int8": 0.1}
LOWEST = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8}
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d)


@dataclass(frozen=True)
class Options:
    """Options of a choice: see `sparsetir.torch.sparsify_`.

    Parameters
    ----------
    lowest : torch.dtype or None
    rows : int
    examples : list
    percentile : float
    seconds : float
    tolerance : float or None
    """

    lowest: torch.dtype | None = None
    rows: int = 64
    examples: tuple[Any, ...] = ()
    percentile: float = 100.0
    seconds: float = 0.1
    tolerance: float | None = None


@dataclass(frozen=True)
class Decision:
    """The decision about one layer.

    Parameters
    ----------
    layer : Module or None
        The new layer; None where the old one stays.
    reason : str
    weights, nonzeros : int
    times : mapping of str to float
        Seconds of a call of each candidate.
    error : float or None
        The norm of the difference of the outputs, relative to that of the outputs.
    kind : str
        The class of the old layer.
    """

    layer: PrunedWeight | None
    reason: str
    weights: int
    nonzeros: int
    times: Mapping[str, float]
    error: float | None = None
    kind: str = ""


def options_of(dtype: Any, rows: Any, examples: Any, percentile: Any, seconds: Any, tolerance: Any) -> Options:
    """Validate options.

    Raises
    ------
    ArgumentError
        A dtype, share or number out of range; int8 without examples.
    """
    lowest = _lowest(dtype)
    if not isinstance(rows, (int, np.integer)) or rows < 1:
        raise ArgumentError(f"rows: expected a positive number of rows, got {shown(rows)}.")
    if not isinstance(percentile, (int, float)) or not 0 < percentile <= 100:
        raise ArgumentError(f"percentile: expected a number in (0, 100], got {shown(percentile)}.")
    for name, value in (("seconds", seconds), ("tolerance", tolerance)):
        if value is not None and (not isinstance(value, (int, float)) or not value > 0):
            raise ArgumentError(f"{name}: expected a positive number, got {shown(value)}.")
    if isinstance(examples, (Tensor, str, Mapping)) or not isinstance(examples, (Iterable, type(None))):
        raise ArgumentTypeError(f"examples: expected a list of batches, got {type(examples).__name__}. Pass [batch].")
    batches = tuple(examples or ())
    if lowest is torch.int8 and not batches:
        raise ArgumentError("examples: expected batches with dtype='int8', got none. They give the range of inputs.")
    return Options(lowest, int(rows), batches, float(percentile), float(seconds), tolerance)


def _lowest(dtype: Any) -> torch.dtype | None:
    names = {**LOWEST, **{value: value for value in LOWEST.values()}}
    if dtype is not None and (not isinstance(dtype, (str, torch.dtype)) or dtype not in names):
        raise ArgumentError(f"dtype: expected one of {', '.join(map(repr, LOWEST))} or None, got {shown(dtype)}.")
    return None if dtype is None else names[dtype]


# ------------------------------------------------------------------ weights of layers


def effective(module: nn.Module, name: str = "weight") -> Tensor:
    """Return a weight as a module computes with it, after pruning hooks and parametrizations."""
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, BasePruningMethod):
            hook(module, None)  # Each pass computes the weight; an optimizer may have changed its origin.
    return getattr(module, name).detach()


def plain_class(module: nn.Module) -> type:
    """Return the class of a module without its parametrizations."""
    return parametrize.type_before_parametrizations(module)


def plain(layer: Any) -> Any:
    """Return a layer with the same weight, without hooks and parametrizations."""
    weight = effective(layer)
    bias = None if layer.bias is None else nn.Parameter(effective(layer, "bias").clone(), requires_grad=False)
    if plain_class(layer) not in CONVOLUTIONS:
        copy = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, dtype=weight.dtype, device="meta")
    else:
        options = {name: getattr(layer, name) for name in CONVOLUTION_OPTIONS}
        kind: Any = plain_class(layer)
        copy = kind(**options, bias=bias is not None, dtype=weight.dtype, device="meta")
    copy.weight, copy.bias = nn.Parameter(weight, requires_grad=False), bias
    return copy.eval()


# ------------------------------------------------------------------ attention


def split_attention(layer: Any) -> PrunedAttention | None:
    """Return a multi-head attention whose projections are linear layers; None for one with options that these lack."""
    is_taken = layer.in_proj_weight is not None and layer.bias_k is None and not layer.add_zero_attn
    if not is_taken or any(p.layout is not torch.strided for p in layer.parameters()):
        return None
    weight, bias = effective(layer, "in_proj_weight"), layer.in_proj_bias
    in_proj = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, dtype=weight.dtype, device="meta")
    in_proj.weight = nn.Parameter(weight, requires_grad=False)
    in_proj.bias = None if bias is None else nn.Parameter(effective(layer, "in_proj_bias"), requires_grad=False)
    return PrunedAttention(layer, in_proj.eval(), plain(layer.out_proj)).eval()


def replace(model: nn.Module, replacements: Mapping[int, nn.Module]) -> nn.Module:
    """Replace modules, given by their id, wherever the model has them; return the model or what replaces it."""
    for module in list(model.modules()):
        for name, child in module._modules.items():  # named_children() leaves out what comes twice.
            if child is not None and id(child) in replacements:
                module._modules[name] = replacements[id(child)]
    return replacements.get(id(model), model)


# ------------------------------------------------------------------ inputs of layers


@dataclass
class Inputs:
    """Inputs of one layer in the examples.

    Parameters
    ----------
    first : Tensor or None
        The input of the first call.
    largest : float
        The magnitude that int8 represents.
    """

    first: Tensor | None = None
    largest: float = 0.0


@contextmanager
def _slow_attention() -> Iterator[None]:
    """Keep torch from computing whole transformer layers without calling the layers inside."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def record(model: nn.Module, layers: Iterable[nn.Module], options: Options) -> dict[int, Inputs]:
    """Run the model on the examples; return the inputs of each layer by its id."""
    records = {id(layer): Inputs() for layer in layers}

    def note(layer: nn.Module, args: tuple[Any, ...]) -> None:
        inputs, x = records[id(layer)], args[0].detach()
        inputs.first = x.clone() if inputs.first is None else inputs.first
        if options.lowest is torch.int8 and x.numel():
            magnitudes = x.abs().float().flatten().numpy()
            inputs.largest = max(inputs.largest, float(np.percentile(magnitudes, options.percentile)))

    hooks = [layer.register_forward_pre_hook(note) for layer in layers]
    try:
        with torch.no_grad(), _slow_attention():
            for batch in options.examples:
                call_with(model, batch)
    finally:
        for hook in hooks:
            hook.remove()
    return records


def call_with(model: nn.Module, batch: Any) -> Any:
    """Call a model with a batch: a tensor, a sequence of arguments, or a mapping of keyword arguments."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, (tuple, list)) else model(batch)


# ------------------------------------------------------------------ decisions


def decide(layer: Any, inputs: Inputs, options: Options) -> Decision:
    """Return the fastest way of a linear layer or convolution whose error is tolerable.

    Parameters
    ----------
    layer : Module
    inputs : Inputs
    options : Options
    """
    weight = effective(layer)
    nonzeros, size = int(torch.count_nonzero(weight)), weight.numel()
    stays = _objection(layer, weight, inputs, options)
    if stays:
        return Decision(None, stays, size, nonzeros, {})
    baseline = plain(layer)
    x = inputs.first
    if x is None:
        x = torch.randn(options.rows, weight.shape[1], generator=torch.Generator().manual_seed(0)).to(weight.dtype)
    first, *others = ways(weight.dtype, options.lowest)
    if nonzeros > MOST_DENSE * size:
        others = [way for way in others if way.split()[0] not in SPARSE]
    if not others:
        return Decision(None, f"more than {MOST_DENSE:.0%} of it is not zero", size, nonzeros, {})
    with torch.no_grad():
        candidates, errors, refused = _candidates(baseline, x, inputs, others, options)
        timers = {name: timer_of(partial(module, x)) for name, module in {first: baseline, **candidates}.items()}
        choice = choose(timers, seconds=options.seconds, refused=refused)
    return _decision(choice, first, candidates, errors, (size, nonzeros))


def _decide(layer: Any, inputs: Inputs, options: Options) -> Decision:
    return dataclasses.replace(decide(layer, inputs, options), kind=plain_class(layer).__name__)


def _decision(
    choice: Choice, first: str, candidates: Mapping[str, Any], errors: Mapping[str, float], sizes: tuple[int, int]
) -> Decision:
    reason, name = choice.reason(first), choice.name
    return Decision(candidates.get(name), f"{name}, {reason}", *sizes, choice.times, errors.get(name))


def _objection(layer: Any, weight: Tensor, inputs: Inputs, options: Options) -> str:
    """Return why a layer stays dense without measurement, or an empty string."""
    if weight.dtype not in PRECISION or weight.dtype is torch.int8:
        return f"its weights are {dtype_name(weight.dtype)}"
    if weight.layout is not torch.strided or weight.device.type != "cpu":
        return "its weights are not strided tensors on the CPU"
    if weight.numel() < LEAST_SIZE:
        return f"smaller than {LEAST_SIZE:,} weights"
    if not bool(torch.isfinite(weight).all()):
        return "its weights are not finite"
    if options.examples and inputs.first is None:
        return "the examples do not reach it"
    if options.lowest is torch.int8 and not math.isfinite(inputs.largest):
        return "its inputs in the examples are not finite"
    is_convolution = plain_class(layer) in CONVOLUTIONS
    return "no examples, which give the size of its images" if is_convolution and inputs.first is None else ""


def _candidates(
    baseline: Any, x: Tensor, inputs: Inputs, names: list[str], options: Options
) -> tuple[dict[str, PrunedWeight], dict[str, float], dict[str, str]]:
    """Return candidates whose results are close, their errors, and reasons against the other ones."""
    expected = baseline(x).double()
    norm = float(torch.linalg.vector_norm(expected)) or 1.0
    candidates: dict[str, PrunedWeight] = {}
    errors, refused = {}, {}
    for way in names:
        try:
            layer = made(baseline, way, inputs.largest / INT8_MAX or 1.0)
            error = float(torch.linalg.vector_norm(layer(x).double() - expected)) / norm
        except (SparseTIRError, RuntimeError) as fault:
            refused[way] = str(fault).splitlines()[0]
            continue
        tolerance = options.tolerance or TOLERANCES[way.split()[1]]
        if not error <= max(tolerance, TOLERANCES[dtype_name(baseline.weight.dtype)]):
            refused[way] = f"relative error {error:.1e}"
            continue
        candidates[way], errors[way] = layer, error
    return candidates, errors, refused


def made(layer: Any, way: str, input_scale: float = 1.0) -> PrunedWeight:
    """Return a linear layer or convolution that computes in one way."""
    if plain_class(layer) in CONVOLUTIONS:
        matrix = matrix_of(layer.weight, layer.groups)
        return PrunedConv(Weight.from_dense(matrix, way, input_scale), layer).eval()
    return PrunedLinear(Weight.from_dense(layer.weight, way, input_scale), layer.bias, layer.weight.dtype).eval()


def choose_layers(model: nn.Module, skip: Collection[str], options: Options) -> tuple[nn.Module, dict[str, Decision]]:
    """Replace the layers of a model by the fastest ones; return it and the decision about each layer by name.

    Parameters
    ----------
    model : Module
        In evaluation mode; changed in place.
    skip : collection of str
    options : Options
    """
    attentions = {n: m for n, m in model.named_modules() if plain_class(m) is nn.MultiheadAttention and n not in skip}
    split = {id(m): split_attention(m) for m in attentions.values()}
    originals = {id(new): m for m in attentions.values() if (new := split[id(m)]) is not None}
    changed = replace(model, {key: new for key, new in split.items() if new is not None})
    restored = {key: old for key, old in originals.items()}
    try:
        linear = (nn.Linear, *CONVOLUTIONS)
        inside = tuple(f"{name}." if name else "" for name in attentions if split[id(attentions[name])] is None)
        named = {n: m for n, m in changed.named_modules() if plain_class(m) in linear and n not in skip}
        named = {n: m for n, m in named.items() if not inside or not n.startswith(inside)}
        inputs = record(changed, list(named.values()), options)
        decisions = {name: _decide(layer, inputs[id(layer)], options) for name, layer in named.items()}
        chosen = {id(named[n]): d.layer for n, d in decisions.items() if d.layer is not None}
        restored = {
            key: old
            for key, old in originals.items()
            if not any(id(m) in chosen for m in split[id(old)].modules())  # type: ignore[union-attr]
        }
        changed = replace(changed, chosen)
    finally:
        changed = replace(changed, restored)
    for name, attention in attentions.items():
        if split[id(attention)] is None:
            weights, nonzeros = _counts(attention)
            reason = "attention with kdim, vdim, bias_k or add_zero_attn stays as it is"
            decisions[name] = Decision(None, reason, weights, nonzeros, {}, kind="MultiheadAttention")
    return changed, decisions


def _counts(module: nn.Module) -> tuple[int, int]:
    matrices = [p for p in module.parameters() if p.dim() > 1]
    return sum(p.numel() for p in matrices), sum(int(torch.count_nonzero(p)) for p in matrices)


# ---------------------------------------------------------------------------- choice at the first call


MAX_CHANGES = 2  # A weight that changes more often stays dense.
LINEAR = (functional.linear, torch.ops.aten.linear.default)


class ChosenLinear(nn.Module):
    """``torch.nn.functional.linear`` with a weight that is constant, for calls without gradients.

    Parameters
    ----------
    options : Options
    """

    def __init__(self, options: Options) -> None:
        super().__init__()
        self.options = options
        self.layer: PrunedLinear | None = None
        self._decided: tuple[Any, ...] = ()
        self._changes, self._lock = 0, threading.Lock()

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return ``x @ weight.T + bias``."""
        operands = [t for t in (x, weight, bias) if t is not None]
        if weight.dim() != 2 or (torch.is_grad_enabled() and any(t.requires_grad for t in operands)):
            return functional.linear(x, weight, bias)
        layer = self._layer_of(x, weight, bias)
        return functional.linear(x, weight, bias) if layer is None else layer(x)

    def _layer_of(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> PrunedLinear | None:
        """Return the layer that was chosen for the weight; choose again after changes in place."""
        state = tuple(None if t is None else (t.data_ptr(), version_of(t)) for t in (weight, bias))
        with self._lock:
            if state == self._decided:
                return self.layer
            self._changes += 1
            self._decided, self.layer = state, None
            if self._changes <= MAX_CHANGES and x.numel():
                self.layer = _chosen(x, weight, bias, self.options)
            elif not x.numel():
                self._decided, self._changes = (), self._changes - 1
            return self.layer


def version_of(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else int(tensor._version)


def _chosen(x: Tensor, weight: Tensor, bias: Tensor | None, options: Options) -> PrunedLinear | None:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, dtype=weight.dtype, device="meta")
    layer.weight = nn.Parameter(weight.detach(), requires_grad=False)
    layer.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
    if x.dtype is not weight.dtype:
        return None
    chosen = decide(layer.eval(), Inputs(x.detach()), options).layer
    return chosen if isinstance(chosen, PrunedLinear) else None


def choose_linear_layers(module: torch.fx.GraphModule, options: Options) -> None:
    """Replace linear layers whose weight is a parameter of the program, in place."""
    for number, node in enumerate(list(module.graph.nodes)):
        if node.op != "call_function" or node.target not in LINEAR:
            continue
        names = ("input", "weight", "bias")
        arguments = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
        if getattr(arguments["weight"], "op", "") not in ("placeholder", "get_attr"):
            continue
        module.add_submodule(f"chosen_linear_{number}", ChosenLinear(options))
        with module.graph.inserting_before(node):
            operands = tuple(arguments.get(name) for name in names)
            node.replace_all_uses_with(module.graph.call_module(f"chosen_linear_{number}", operands))
        module.graph.erase_node(node)


__all__ = [
    "ChosenLinear",
    "Decision",
    "Options",
    "choose_layers",
    "choose_linear_layers",
    "decide",
    "effective",
    "made",
    "options_of",
]
