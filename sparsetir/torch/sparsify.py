# SPDX-License-Identifier: Apache-2.0
"""Replacement of the layers of a model by sparse ones: for training, or for inference by measurement."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch.nn.utils import parametrize

import torch
from sparsetir.errors import ArgumentError, ArgumentTypeError
from sparsetir.torch.linear import SparseLinear, check_share
from sparsetir.torch.pruned_choice import Decision, Options, choose_layers, options_of
from sparsetir.utils.arguments import shown
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
    dtype : {"float32", "bfloat16", "int8"}, optional
        The lowest precision that a measured choice may compute in; inputs and outputs keep theirs. Default: that of
        each weight. int8 is symmetric, with a scale for each output and one for the inputs.
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
        The greatest relative error of a candidate. Default: 2e-2 for bfloat16, 0.1 for int8, 1e-3 for float32.

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
    layers = {name: m for name, m in model.named_modules() if _is_linear(m)}
    skippable = _other_layers(model, layers)
    unknown = sorted(set(skip) - set(layers) - set(skippable))
    if unknown:
        raise ArgumentError(f"skip has {unknown[0]!r}; the linear layers are {', '.join(layers) or 'none'}")
    if _is_measured(decide, dtype, examples):
        options = options_of(dtype, rows, examples, percentile, seconds, tolerance)
        return _sparsify_measured(model, keep, density, skip, report, options)
    sparse_layers: dict[int, SparseLinear] = {}
    changes: list[LayerChange] = []
    for name, layer in layers.items():
        if name in skip:
            changes.append(_unchanged(name, layer, "in skip"))
            continue
        _check_unshared(model, name, layer)
        sparse_layers[id(layer)] = SparseLinear.from_dense(layer, density)
        changes.append(_change(name, layer, sparse_layers[id(layer)], density))
    for module in list(model.modules()):
        for name, child in module._modules.items():  # named_children() leaves out what comes twice
            if id(child) in sparse_layers:
                module._modules[name] = sparse_layers[id(child)]
    changes += [_unchanged(n, m, "in skip" if n in skip else NO_LINEAR) for n, m in skippable.items()]
    _warn(changes)
    if report is not None:
        report.extend(changes)
    return sparse_layers.get(id(model), model)


def _check_model(model: Any, skip: Any, report: Any) -> None:
    """Check the model, the names of layers to skip, and the list for the report."""
    is_listing = isinstance(skip, Collection) and not isinstance(skip, (str, bytes, Tensor, np.ndarray))
    is_listing = is_listing and all(isinstance(name, str) for name in skip)
    if not isinstance(model, nn.Module) or not is_listing:
        description = type(model).__name__ if is_listing else f"skip={shown(skip)}"
        raise ArgumentTypeError(f"sparsify_ takes a torch.nn.Module, and a list of names to skip; found {description}")
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
    options: Options,
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


def _is_linear(module: nn.Module) -> bool:
    return parametrize.type_before_parametrizations(module) in (nn.Linear, nn.LazyLinear)


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
    kind = parametrize.type_before_parametrizations(module).__name__
    return LayerChange(name, kind, False, reason, weights, nonzeros, weights)


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


__all__ = ["LayerChange", "SparsifyReport", "sparsify_"]
