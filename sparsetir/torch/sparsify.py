# SPDX-License-Identifier: Apache-2.0
"""Replacement of the layers of a model by sparse ones: for training, or for inference, as measured."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from torch.nn import functional
from torch.nn.utils import parametrize

import torch
from sparsetir.errors import ArgumentError, ArgumentTypeError, SparseTIRError
from sparsetir.interop.arrays import clipped_range, uint8_quantization
from sparsetir.ir.halves import check_precision
from sparsetir.torch.linear import SparseLinear, check_share, effective
from sparsetir.torch.pruned_layers import (
    CONVOLUTION_OPTIONS,
    IN_PARTS,
    MIDDLE,
    PRECISION,
    SPARSE,
    PrunedAttention,
    PrunedConv,
    PrunedLinear,
    PrunedWeight,
    Weight,
    dtype_name,
    matrix_of,
    suits_ranges,
    ways,
)
from sparsetir.utils.arguments import as_seconds, is_integer, shown
from sparsetir.utils.caches import ForkLock
from sparsetir.workloads.timing import LEAST_SIZE, MOST_DENSE, FastestCandidate, choose, timer_of
from torch import Tensor, nn

NO_LINEAR = "not a torch.nn.Linear"
NOT_MEASURED = "a layer of this kind stays as it is"
MOST_NONZERO = 0.9  # of weights of a layer that counts as pruned


@dataclass(frozen=True)
class LayerChange:
    """Report of `sparsify_` on one layer.

    Parameters
    ----------
    name : str
        As in ``model.named_modules()``.
    kind : str
        The class of the layer.
    is_sparse : bool
        Whether it is sparse now.
    reason : str
    weights, nonzeros, kept : int
        Weights of the layer, those that were not zero, and those that it has now.
    times : mapping of str to float
        Seconds of a call in each way that was measured.
    error : float, optional
        The norm of the difference that a measured choice makes to the layer's output, relative to that of the output.
    """

    name: str
    kind: str
    is_sparse: bool
    reason: str
    weights: int
    nonzeros: int
    kept: int
    times: Mapping[str, float] = dataclasses.field(default_factory=dict)
    error: float | None = None

    @property
    def density(self) -> float:
        """The share of weights that were not zero."""
        return self.nonzeros / max(self.weights, 1)

    def __str__(self) -> str:
        now = f"sparse, {self.kept} of {self.weights} weights" if self.is_sparse else "dense"
        return f"{self.name or 'the model'} ({self.kind}): {now}, {self.reason}"


class SparsifyReport(list[LayerChange]):
    """A list of `LayerChange` for the argument `report` of `sparsify_`, printed as a table.

    Examples
    --------
    >>> import torch, sparsetir.torch
    >>> report = sparsetir.torch.SparsifyReport()
    >>> _ = sparsetir.torch.sparsify_(torch.nn.Linear(100, 50), 0.2, report=report)
    >>> len(report), report[0].kept
    (1, 1000)
    """

    def __str__(self) -> str:
        return "\n".join(map(str, self))

    @property
    def seconds(self) -> tuple[float, float]:
        """Seconds of a call of all measured layers: as they were, and as they are."""
        measured = [c for c in self if c.times]
        chosen = (c.times[c.reason.partition(",")[0]] for c in measured)
        return sum(next(iter(c.times.values())) for c in measured), sum(chosen)


def sparsify_(
    model: nn.Module,
    density: float | None = None,
    *,
    keep: str | None = None,
    skip: Collection[str] = (),
    report: list[LayerChange] | None = None,
    decide: str | None = None,
    dtype: str | torch.dtype | None = None,
    examples: Sequence[Any] | None = None,
    rows: int = 64,
    percentile: float = 100.0,
    seconds: float = 0.1,
    tolerance: float | None = None,
    precision: str | None = None,
) -> nn.Module:
    """Replace the linear layers of a model by sparse ones with their largest weights, or with those that are not zero.

    Parameters
    ----------
    model : torch.nn.Module
        Changed in place: layers of the class ``torch.nn.Linear``, also pruned and parametrized ones, whose weights are
        those that the layer computes with; not of classes derived from it. Hooks and parametrizations of these layers
        are not taken along.
    density : float, optional
        The share of each layer's weights that stay, in [0, 1].
    keep : {"largest", "nonzeros"}, optional
        Which weights stay: the largest, as many as `density` says, or those that are not zero. Default: the largest
        where there is a density.
    skip : collection of str
        Names of layers to leave alone, as in ``model.named_modules()``.
    report : list, optional
        A `LayerChange` is appended for each layer with a matrix of weights.
    decide : {"always", "measure"}, optional
        Replace every linear layer by a `SparseLinear`, which can be trained; or, in a model for inference, time each
        layer dense and sparse and keep what is faster. The measured choice includes convolutions of one and two
        dimensions and ``torch.nn.MultiheadAttention``, keeps the weights that are not zero, and makes them constant.
        Default: "measure" where there are a dtype or examples.
    dtype : {"float32", "bf16x3", "bfloat16", "int8"}, optional
        The lowest precision that a measured choice may compute in; inputs and outputs keep theirs. Default: that of
        each weight. ``"bf16x3"`` is that of `sparsetir.ops.spmm`, where the processor multiplies bfloat16 numbers.
        int8 has a scale for each output, and one scale and a zero point for the inputs.
    examples : sequence, optional
        Batches: tensors, tuples of arguments or dicts of keyword arguments. Layers are timed with the inputs that they
        have in the first one. int8 takes the range of inputs from all of them, and needs them; so do convolutions.
    rows : int
        The number of rows that linear layers are timed with where there are no examples.
    percentile : float
        The share of magnitudes of inputs, in percent, that int8 represents; larger ones are clipped.
    seconds : float
        For each candidate of each layer.
    tolerance : float, optional
        The greatest relative error of a candidate. Default: 2e-2 for bfloat16, 0.1 for int8, 1e-3 for float32 and
        bf16x3.
    precision : {"bf16x3"}, optional
        Of the products of each `SparseLinear`; a measured choice has `dtype` instead.

    Returns
    -------
    torch.nn.Module
        The model; the new layer where it is one itself. Make the optimizer afterwards: parameters are new.

    Raises
    ------
    ArgumentError
        No layer has a name of `skip`; two modules share a weight, which they would not any more; a density where
        nonzeros are kept, or none for the largest weights; a measured choice of a model in training mode.

    Warns
    -----
    UserWarning
        Layers that stay dense and are not in `skip`; a layer that was pruned loses weights that are not zero.

    Examples
    --------
    >>> import torch, sparsetir.torch
    >>> sparsetir.torch.sparsify_(torch.nn.Sequential(torch.nn.Linear(100, 50), torch.nn.ReLU()), 0.2)[0]
    SparseLinear(in_features=100, out_features=50, density=0.2, bias=True)
    """
    _check_keep(density, keep)
    _check_model(model, skip, report)
    layers = {name: m for name, m in model.named_modules() if plain_class(m) in (nn.Linear, nn.LazyLinear)}
    skippable = _other_layers(model, layers)
    unknown = sorted(set(skip) - set(layers) - set(skippable))
    if unknown:
        raise ArgumentError(f"skip has {unknown[0]!r}; the linear layers are {', '.join(layers) or 'none'}")
    if _is_measured(decide, dtype, examples):
        options = options_of(dtype, rows, examples, percentile, seconds, tolerance)
        if precision is not None:
            fault = f"precision: expected None with a measured choice, got {shown(precision)}"
            raise ArgumentError(f"{fault}. Pass it as dtype.")
        return _sparsify_measured(model, keep, density, skip, report, options)
    check_precision(precision, "float32")
    sparse_layers: dict[int, SparseLinear] = {}
    changes: list[LayerChange] = []
    for name, layer in layers.items():
        if name in skip:
            changes.append(_unchanged(name, layer, "in skip"))
            continue
        _check_unshared(model, name, layer)
        sparse_layers[id(layer)] = SparseLinear.from_dense(layer, density, precision=precision)
        changes.append(_change(name, layer, sparse_layers[id(layer)], density))
    replaced = replace(model, sparse_layers)
    changes += [_unchanged(n, m, "in skip" if n in skip else NO_LINEAR) for n, m in skippable.items()]
    _warn(changes)
    if report is not None:
        report.extend(changes)
    return replaced


def _check_model(model: Any, skip: Any, report: Any) -> None:
    """Check the model, the names of layers to skip, and the list for the report."""
    is_listing = isinstance(skip, Collection) and not isinstance(skip, (str, bytes, Tensor, np.ndarray))
    is_listing = is_listing and all(isinstance(name, str) for name in skip)
    if not isinstance(model, nn.Module) or not is_listing:
        description = type(model).__name__ if is_listing else f"skip={shown(skip)}"
        raise ArgumentTypeError(f"sparsify_ takes a torch.nn.Module, and a list of names to skip, got {description}")
    if report is not None and not isinstance(report, list):
        raise ArgumentTypeError(f"report: expected a list to extend, got {type(report).__name__}. Pass [].")


def _is_measured(decide: Any, dtype: Any, examples: Any) -> bool:
    if not isinstance(decide, (str, type(None))) or decide not in (None, "always", "measure"):
        raise ArgumentError(f"decide: expected 'always' or 'measure', got {shown(decide)}.")
    if decide == "always" and (dtype is not None or examples is not None):
        raise ArgumentError("decide: expected 'measure' with a dtype or examples, got 'always'. Leave these out.")
    return decide == "measure" or dtype is not None or examples is not None


def _sparsify_measured(
    model: nn.Module,
    keep: str | None,
    density: float | None,
    skip: Collection[str],
    report: list[LayerChange] | None,
    options: SparsifyOptions,
) -> nn.Module:
    """Replace the layers of a model where a measurement says so."""
    if density is not None or keep == "largest":
        raise ArgumentError("keep: expected 'nonzeros' with a measured choice, got 'largest'. Prune the model first.")
    if model.training:
        raise ArgumentError("model: expected evaluation mode, got training mode. Call model.eval() first.")
    others = {name: module for name, module in model.named_modules() if _matrices(module)}
    unchanged = {n: _unchanged(n, m, "in skip" if n in skip else NOT_MEASURED) for n, m in others.items()}
    changed, decisions = choose_layers(model, skip, options)
    changes = [_measured_change(name, decision) for name, decision in decisions.items()]
    split = {name.removesuffix("in_proj").removesuffix(".") for name in decisions if name.endswith("in_proj")}
    changes += [c for name, c in unchanged.items() if name not in decisions and name not in split]
    if report is not None:
        report.extend(changes)
    return changed


def _measured_change(name: str, decision: Decision) -> LayerChange:
    way = "" if decision.layer is None else decision.layer.way
    is_sparse = bool(way) and not way.startswith("dense")
    sizes = decision.weights, decision.nonzeros, decision.nonzeros if is_sparse else decision.weights
    return LayerChange(name, decision.kind, is_sparse, decision.reason, *sizes, decision.times, decision.error)


def _check_keep(density: float | None, keep: str | None) -> None:
    if density is not None:
        check_share("density", density)
    if not isinstance(keep, (str, type(None))) or keep not in (None, "largest", "nonzeros"):
        raise ArgumentError(f"keep: expected 'largest' or 'nonzeros', got {shown(keep)}.")
    if keep == "nonzeros" and density is not None:
        raise ArgumentError(f"density: expected None with keep='nonzeros', got {density}. Leave one of them out.")
    if keep == "largest" and density is None:
        raise ArgumentError("density: expected a share in [0, 1] with keep='largest', got None.")


def _other_layers(model: nn.Module, layers: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Return the other modules that have matrices of weights."""
    inside = tuple(f"{name}." if name else "parametrizations." for name in layers)
    return {
        name: module
        for name, module in model.named_modules()
        if name not in layers and not name.startswith(inside) and _matrices(module)
    }


def _matrices(module: nn.Module) -> list[Tensor]:
    """Return the weights of two dimensions or more that a module has itself, as it computes with them."""
    if isinstance(module, parametrize.ParametrizationList):
        return []
    names = [*module._parameters, *(module.parametrizations if parametrize.is_parametrized(module) else ())]
    weights = [getattr(module, n.removesuffix("_orig"), None) for n in names]  # which pruning adds
    return [w for w in weights if isinstance(w, Tensor) and not nn.parameter.is_lazy(w) and w.dim() > 1]


def _unchanged(name: str, module: nn.Module, reason: str) -> LayerChange:
    matrices = _matrices(module)
    weights, nonzeros = sum(w.numel() for w in matrices), sum(int(torch.count_nonzero(w)) for w in matrices)
    return LayerChange(name, plain_class(module).__name__, False, reason, weights, nonzeros, weights)


def _change(name: str, layer: nn.Linear, sparse: SparseLinear, density: float | None) -> LayerChange:
    before = _unchanged(name, layer, "the weights that were not zero" if density is None else "the largest weights")
    return dataclasses.replace(before, weights=layer.weight.numel(), is_sparse=True, kept=sparse.graph.num_edges)


def _warn(changes: list[LayerChange]) -> None:
    """Warn of layers that stay dense, and of pruned ones that lose weights."""
    unchanged = [c for c in changes if not c.is_sparse and c.reason == NO_LINEAR and not c.kind.startswith("Embedding")]
    dense = [f"{c.name or 'the model'} ({c.kind})" for c in unchanged]
    if dense:
        text = f"sparsify_ leaves {', '.join(dense)} dense: only layers of the class torch.nn.Linear are replaced. "
        warnings.warn(f"{text}Name them in skip to leave them without this warning.", stacklevel=3)
    for change in changes:
        dropped = change.nonzeros - change.kept
        if change.is_sparse and dropped > 0 and change.nonzeros <= MOST_NONZERO * change.weights:
            text = f"sparsify_ drops {dropped} of the {change.nonzeros} weights of {change.name or 'the layer'}"
            share = change.nonzeros / change.weights
            advice = f"give a density of {share:.3g} or more, or none to keep all that are not zero"
            warnings.warn(f"{text} that earlier pruning left: {advice}", stacklevel=3)


def _check_unshared(model: nn.Module, name: str, layer: nn.Linear) -> None:
    for other, module in model.named_modules():
        if module is not layer and any(p is layer.weight for p in module._parameters.values()):
            raise ArgumentError(f"{name} shares its weight with {other or 'the model'}: pass skip=[{name!r}]")


# ------------------------------------------------------------------------------- choice by measurement


# The greatest error of a candidate relative to the layer, by the norms of the outputs.
TOLERANCES = {"float64": 1e-8, "float32": 1e-3, IN_PARTS: 1e-3, "float16": 2e-2, "bfloat16": 2e-2, "int8": 0.1}
LOWEST: dict[str, torch.dtype | str] = {
    "float32": torch.float32,
    IN_PARTS: IN_PARTS,
    "bfloat16": torch.bfloat16,
    "int8": torch.int8,
}
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d)


@dataclass(frozen=True)
class SparsifyOptions:
    """Options of a choice: see `sparsetir.torch.sparsify_`.

    Parameters
    ----------
    lowest : torch.dtype, "bf16x3" or None
    rows : int
    examples : list
    percentile : float
    seconds : float
    tolerance : float or None
    """

    lowest: torch.dtype | str | None = None
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


def options_of(dtype: Any, rows: Any, examples: Any, percentile: Any, seconds: Any, tolerance: Any) -> SparsifyOptions:
    """Validate options.

    Raises
    ------
    ArgumentError
        A dtype, share or number out of range; int8 without examples.
    """
    lowest = _lowest(dtype)
    if not is_integer(rows) or rows < 1:
        raise ArgumentError(f"rows: expected a positive number of rows, got {shown(rows)}.")
    if not isinstance(percentile, (int, float)) or not 0 < percentile <= 100:
        raise ArgumentError(f"percentile: expected a number in (0, 100], got {shown(percentile)}.")
    if tolerance is not None and (not isinstance(tolerance, (int, float)) or not tolerance > 0):
        raise ArgumentError(f"tolerance: expected a positive number, got {shown(tolerance)}.")
    duration = as_seconds(seconds, "seconds", positive=True)
    if isinstance(examples, (Tensor, str, Mapping)) or not isinstance(examples, (Iterable, type(None))):
        raise ArgumentTypeError(f"examples: expected a list of batches, got {type(examples).__name__}. Pass [batch].")
    batches = tuple(examples or ())
    if lowest is torch.int8 and not batches:
        raise ArgumentError("examples: expected batches with dtype='int8', got none. They give the range of inputs.")
    return SparsifyOptions(lowest, int(rows), batches, float(percentile), duration, tolerance)


def _lowest(dtype: Any) -> torch.dtype | str | None:
    names = {**LOWEST, **{value: value for value in LOWEST.values()}}
    if dtype is not None and (not isinstance(dtype, (str, torch.dtype)) or dtype not in names):
        raise ArgumentError(f"dtype: expected one of {', '.join(map(repr, LOWEST))} or None, got {shown(dtype)}.")
    return None if dtype is None else names[dtype]


# ------------------------------------------------------------------ weights of layers


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
    """Replace modules, given by their id, wherever the model has them; return the model or its replacement."""
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
    bounds : tuple of float, optional
        The least and the largest value within that magnitude; both signs by default.
    """

    first: Tensor | None = None
    largest: float = 0.0
    bounds: tuple[float, float] | None = None

    def note_range(self, x: Tensor, percentile: float) -> None:
        """Extend the range by that of an input, without the largest magnitudes beyond a percentile."""
        least, most, limit = clipped_range(x.float().flatten().numpy(), percentile)
        self.largest = max(self.largest, limit)
        before = self.bounds or (0.0, 0.0)
        self.bounds = min(before[0], least), max(before[1], most)

    @property
    def quantization(self) -> tuple[float, int]:
        """The scale and the zero point of uint8."""
        return uint8_quantization(*(self.bounds or (-self.largest, self.largest)))


@contextmanager
def _slow_attention() -> Iterator[None]:
    """Keep torch from computing whole transformer layers without calling the layers inside."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def record(model: nn.Module, layers: Iterable[nn.Module], options: SparsifyOptions) -> dict[int, Inputs]:
    """Run the model on the examples; return the inputs of each layer by its id."""
    records = {id(layer): Inputs() for layer in layers}

    def note(layer: nn.Module, args: tuple[Any, ...]) -> None:
        inputs, x = records[id(layer)], args[0].detach()
        inputs.first = x.clone() if inputs.first is None else inputs.first
        if options.lowest is torch.int8 and x.numel():
            inputs.note_range(x, options.percentile)

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


def decide(layer: Any, inputs: Inputs, options: SparsifyOptions) -> Decision:
    """Return the fastest way of a linear layer or convolution whose error is tolerable."""
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
    if suits_ranges(weight):
        others.append("ranges float32")
    if nonzeros > MOST_DENSE * size:
        others = [way for way in others if way.split()[0] not in SPARSE]
    if not others:
        return Decision(None, f"more than {MOST_DENSE:.0%} of it is not zero", size, nonzeros, {})
    with torch.no_grad():
        candidates, errors, refused = _candidates(baseline, x, inputs, others, options)
        timers = {name: timer_of(partial(module, x)) for name, module in {first: baseline, **candidates}.items()}
        choice = choose(timers, seconds=options.seconds, refused=refused)
    return _decision(choice, first, candidates, errors, (size, nonzeros))


def _decide(layer: Any, inputs: Inputs, options: SparsifyOptions) -> Decision:
    return dataclasses.replace(decide(layer, inputs, options), kind=plain_class(layer).__name__)


def _decision(
    choice: FastestCandidate,
    first: str,
    candidates: Mapping[str, Any],
    errors: Mapping[str, float],
    sizes: tuple[int, int],
) -> Decision:
    reason, name = choice.reason(first), choice.name
    return Decision(candidates.get(name), f"{name}, {reason}", *sizes, choice.times, errors.get(name))


def _objection(layer: Any, weight: Tensor, inputs: Inputs, options: SparsifyOptions) -> str:
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
    baseline: Any, x: Tensor, inputs: Inputs, names: list[str], options: SparsifyOptions
) -> tuple[dict[str, PrunedWeight], dict[str, float], dict[str, str]]:
    """Return candidates whose results are close, their errors, and reasons against the other ones."""
    expected = baseline(x).double()
    norm = float(torch.linalg.vector_norm(expected)) or 1.0
    candidates: dict[str, PrunedWeight] = {}
    errors, refused = {}, {}
    for way in names:
        try:
            layer = made(baseline, way, *inputs.quantization)
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


def made(layer: Any, way: str, input_scale: float = 1.0, input_zero: int = MIDDLE) -> PrunedWeight:
    """Return a linear layer or convolution that computes in one way."""
    if plain_class(layer) in CONVOLUTIONS:
        matrix = matrix_of(layer.weight, layer.groups)
        return PrunedConv(Weight.from_dense(matrix, way, input_scale, input_zero), layer).eval()
    weight = Weight.from_dense(layer.weight, way, input_scale, input_zero)
    return PrunedLinear(weight, layer.bias, layer.weight.dtype).eval()


def choose_layers(
    model: nn.Module, skip: Collection[str], options: SparsifyOptions
) -> tuple[nn.Module, dict[str, Decision]]:
    """Replace the layers of a model by the fastest ones; return it and the decision about each layer by name.

    Parameters
    ----------
    model : Module
        In evaluation mode; changed in place.
    skip : collection of str
    options : SparsifyOptions
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
    """``torch.nn.functional.linear`` with a weight that is constant, for calls without gradients."""

    def __init__(self, options: SparsifyOptions) -> None:
        super().__init__()
        self.options = options
        self.layer: PrunedLinear | None = None
        self._decided: tuple[Any, ...] = ()
        self._changes, self._lock = 0, ForkLock()

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


def _chosen(x: Tensor, weight: Tensor, bias: Tensor | None, options: SparsifyOptions) -> PrunedLinear | None:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, dtype=weight.dtype, device="meta")
    layer.weight = nn.Parameter(weight.detach(), requires_grad=False)
    layer.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
    if x.dtype is not weight.dtype:
        return None
    chosen = decide(layer.eval(), Inputs(x.detach()), options).layer
    return chosen if isinstance(chosen, PrunedLinear) else None


def choose_linear_layers(module: torch.fx.GraphModule, options: SparsifyOptions) -> None:
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
    "LayerChange",
    "SparsifyOptions",
    "SparsifyReport",
    "choose_layers",
    "choose_linear_layers",
    "decide",
    "made",
    "options_of",
    "sparsify_",
]
