# SPDX-License-Identifier: Apache-2.0
"""Linear layers whose weights are sparse while they are trained."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.sparse as sp
from torch.nn.utils import parametrize
from torch.nn.utils.prune import BasePruningMethod

import torch
from sparsetir.errors import ArgumentError, ArgumentTypeError, LoweringError
from sparsetir.interop import array_of_numbers
from sparsetir.torch.functions import NAMES
from sparsetir.torch.graph import Graph
from sparsetir.utils.arguments import shown
from torch import Tensor, nn

Array = np.ndarray
NO_LINEAR = "not a torch.nn.Linear"
MOST_NONZERO = 0.9  # of weights of a layer that counts as pruned
STRUCTURE = ("crow_indices", "col_indices")


class _Weight(sp.csr_array):
    """A weight in scipy that functions of torch refuse with a reason.

    Layers of torch that look for a fast way ask whether weights are plain, and are told that this one is not.
    """

    @classmethod
    def __torch_function__(cls, func: Any, _types: Any, _args: Any = (), _kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", str(func))
        raise ArgumentTypeError(
            f"torch's {name} was called with the weight of a SparseLinear, a matrix of scipy: call the layer, or pass "
            "torch.from_numpy(layer.weight.toarray())"
        )


class SparseLinear(nn.Module):
    """A linear layer ``x @ W.T + bias`` whose W has values at fixed places only, forward and backward.

    Parameters
    ----------
    in_features, out_features : int
    density : float
        The share of weights that there are, in [0, 1]; their places are drawn (from torch's generator).
    bias : bool
    mask : sparse matrix, Tensor or ndarray, optional
        The places instead: those of a matrix [out, in] that are not zero, of a sparse one those it stores.
    dtype : torch.dtype, optional
        Default: torch's.

    Attributes
    ----------
    values : Parameter
        The weights row after row, [nnz]: what optimizers see. They are drawn as those of ``torch.nn.Linear``, for the
        number of weights that a row has on average.
    bias : Parameter or None
    graph : Graph
        The places.

    Notes
    -----
    ``state_dict`` has the CSR arrays ``crow_indices``, ``col_indices`` and ``values``; loading it takes any pattern of
    the layer's shape. What an optimizer keeps of each weight does not follow: make it afterwards, or load its state.

    Examples
    --------
    >>> import torch, sparsetir.torch
    >>> layer = sparsetir.torch.SparseLinear(64, 32, density=0.25)
    >>> layer(torch.ones(8, 64)).sum().backward()
    >>> layer.values.grad.shape, layer
    (torch.Size([512]), SparseLinear(in_features=64, out_features=32, density=0.25, bias=True))
    """

    values: Tensor
    bias: Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        density: float = 0.1,
        bias: bool = True,
        mask: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        dtype = torch.get_default_dtype() if dtype is None else dtype
        _check_layer(in_features, out_features, dtype)
        self.in_features, self.out_features = in_features, out_features
        self.graph = Graph(_drawn(self._shape, density) if mask is None else _places(mask, self._shape))
        self.values = nn.Parameter(torch.empty(self.graph.num_edges, dtype=dtype))
        self.register_parameter("bias", nn.Parameter(torch.empty(out_features, dtype=dtype)) if bias else None)
        self.reset_parameters()

    @classmethod
    def from_dense(cls, layer: nn.Linear, density: float | None = None, *, mask: Any = None) -> SparseLinear:
        """Return the layer with its largest weights, or those at given places; bias and weights are copied.

        Parameters
        ----------
        layer : torch.nn.Linear
        density : float, optional
            The share of weights to keep. Default: those that are not zero.
        mask : sparse matrix, Tensor or ndarray, optional
            As in `SparseLinear`.
        """
        if nn.parameter.is_lazy(layer.weight):
            raise ArgumentError("the layer has no weights yet: call the model once, which makes them")
        for hook in layer._forward_pre_hooks.values():
            if isinstance(hook, BasePruningMethod):
                hook(layer, None)  # the weight is made in each pass, and an optimizer may have changed its origin
        weight = layer.weight.detach()
        if mask is None:
            mask = weight != 0 if density is None else _largest(weight, density)
        sparse = cls(layer.in_features, layer.out_features, bias=layer.bias is not None, mask=mask, dtype=weight.dtype)
        with torch.no_grad():
            sparse.values.copy_(weight[sparse._rows(), sparse._columns()])
            if sparse.bias is not None:
                sparse.bias.copy_(layer.bias)
            sparse.values.requires_grad_(_is_trained(layer, "weight"))
            if sparse.bias is not None:
                sparse.bias.requires_grad_(_is_trained(layer, "bias"))
        return sparse.train(layer.training)

    def reset_parameters(self) -> None:
        """Draw values and bias again."""
        bound = 1 / math.sqrt(max(self.graph.num_edges / max(self.out_features, 1), 1))
        nn.init.uniform_(self.values, -bound, bound)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer of x [..., in]; [..., out]."""
        if isinstance(x, torch.fx.Proxy):
            raise ArgumentTypeError("x is a Proxy of torch.fx.symbolic_trace: trace with torch.export instead")
        if torch.jit.is_tracing():
            raise LoweringError("torch.jit.trace would keep results of kernels as constants: use torch.export instead")
        if not isinstance(x, Tensor) or x.dim() == 0 or x.shape[-1] != self.in_features:
            description = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise ArgumentError(f"expected a tensor of shape [..., {self.in_features}], found {description}")
        if torch.is_autocast_enabled("cpu"):
            return self._autocast(x)
        return self._product(x, self.values, self.bias)

    def _autocast(self, x: Tensor) -> Tensor:
        """Return the layer in the dtype of autocast, as torch.nn.Linear has it there."""
        dtype = torch.get_autocast_dtype("cpu")
        return self._product(x.to(dtype), self.values.to(dtype), None if self.bias is None else self.bias.to(dtype))

    def _product(self, x: Tensor, values: Tensor, bias: Tensor | None) -> Tensor:
        if x.dtype is not values.dtype or x.dtype not in NAMES:
            advice = "convert one of them to the dtype of the other, one of floats"
            raise ArgumentTypeError(f"x is {x.dtype} and the weights are {values.dtype}: {advice}")
        y = self.graph.linear(values, x)
        return y if bias is None else y.add_(bias)

    # ------------------------------------------------------------------ the pattern

    @property
    def density(self) -> float:
        """The share of weights that there are."""
        return self.graph.num_edges / max(self.in_features * self.out_features, 1)

    @property
    def weight(self) -> sp.csr_array:
        """W as a matrix of scipy, a copy; values of 16 bits, which scipy lacks, are of 32."""
        rows = self.graph.rows
        values = self.values.detach()
        values = values.float() if values.dtype in (torch.bfloat16, torch.float16) else values
        return _Weight((values.numpy().copy(), rows.indices.copy(), rows.indptr.copy()), shape=self._shape)

    def regrow(self, mask: Any, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Change the places of weights: those that stay keep their values, new ones are zero.

        Parameters
        ----------
        mask : sparse matrix, Tensor or ndarray
            As in `SparseLinear`.
        optimizer : torch.optim.Optimizer, optional
            One that has `values`: what it keeps of each weight goes along, zero for new ones. `values` stays the same
            Parameter.
        """
        graph = Graph(_places(mask, self._shape))
        before, after = self._keys(self.graph), self._keys(graph)
        place = np.searchsorted(before, after)
        place[place == before.size] = 0
        stays = torch.from_numpy(before[place] == after if before.size else np.zeros(after.size, bool))
        source = torch.from_numpy(place)

        def moved(old: Tensor) -> Tensor:
            new = old.new_zeros(after.size)
            new[stays] = old[source[stays]]
            return new

        state = {} if optimizer is None else optimizer.state.get(self.values, {})
        for name, value in state.items():
            if isinstance(value, Tensor) and value.shape == self.values.shape and value.dim():
                state[name] = moved(value)
        self._replace(graph, moved(self.values.detach()))

    def drop_and_grow(
        self, fraction: float, scores: Tensor | None = None, optimizer: torch.optim.Optimizer | None = None
    ) -> None:
        """Move a share of the weights: the smallest are dropped, as many grow where there were none.

        Parameters
        ----------
        fraction : float
            In [0, 1].
        scores : Tensor, optional
            [out, in]: weights grow where these are largest in magnitude, as dense gradients are for RigL. Default: at
            random places, as in SET.
        optimizer : torch.optim.Optimizer, optional
            See `regrow`.
        """
        _check_share("fraction", fraction)
        if scores is not None and tuple(scores.shape) != self._shape:
            raise ArgumentError(f"scores have shape {list(scores.shape)}, expected {list(self._shape)}")
        count = self.graph.num_edges
        moving = min(round(fraction * count), self.in_features * self.out_features - count)
        keep = torch.topk(self.values.detach().abs().float(), count - moving).indices
        was = torch.zeros(self._shape, dtype=torch.bool)
        was[self._rows(), self._columns()] = True
        rank = torch.rand(self._shape) if scores is None else scores.detach().abs().float()
        grown = torch.topk(rank.masked_fill(was, -1).flatten(), moving).indices
        mask = torch.zeros(self._shape, dtype=torch.bool)
        mask[self._rows()[keep], self._columns()[keep]] = True
        mask.view(-1)[grown] = True
        self.regrow(mask, optimizer)

    @property
    def _shape(self) -> tuple[int, int]:
        return self.out_features, self.in_features

    def _rows(self) -> Tensor:
        return self.graph.edge_index[1]

    def _columns(self) -> Tensor:
        return self.graph.edge_index[0]

    def _keys(self, graph: Graph) -> Array:
        """Return a number for each place, ascending."""
        columns, rows = graph.edge_index.numpy()
        return rows * max(self.in_features, 1) + columns

    def _replace(self, graph: Graph, values: Tensor) -> None:
        self.graph = graph
        self.values.grad = None
        hooks = self.values._backward_hooks, getattr(self.values, "_post_accumulate_grad_hooks", None)
        if values.shape != self.values.shape and not any(hooks):
            # The autograd graph of an earlier pass, whose loss may still be alive, expects gradients of the old size.
            with suppress(RuntimeError):  # the tensor has other references, such as a compiled program
                fresh = nn.Parameter(torch.empty_like(values), requires_grad=self.values.requires_grad)
                torch.utils.swap_tensors(self.values, fresh)
        self.values.data = values

    # ------------------------------------------------------------------ saving

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name, array in zip(STRUCTURE, (self.graph.rows.indptr, self.graph.rows.indices), strict=True):
            destination[prefix + name] = torch.from_numpy(array.copy())

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, metadata: Any, strict: bool, missing: Any, unexpected: Any, errors: Any
    ) -> None:
        arrays = [state_dict.get(prefix + name) for name in (*STRUCTURE, "values")]
        remaining = {
            key: value for key, value in state_dict.items() if key not in {prefix + name for name in STRUCTURE}
        }
        missing.extend(prefix + n for n, v in zip(STRUCTURE, arrays, strict=False) if v is None and strict)
        if all(value is not None for value in arrays):
            try:
                self._restructure(*arrays)
            except ArgumentError as error:
                errors.append(f"{prefix}crow_indices and col_indices: {error}")
                return
        super()._load_from_state_dict(remaining, prefix, metadata, strict, missing, unexpected, errors)

    def _restructure(self, indptr: Tensor, indices: Tensor, values: Tensor) -> None:
        """Take another pattern; its values come by themselves."""
        if indptr.numel() != self.out_features + 1 or indices.shape != values.shape:
            sizes = f"{indptr.numel()} row pointers, {indices.numel()} columns and {values.numel()} values"
            raise ArgumentError(f"found {sizes}, expected {self.out_features + 1}, and as many columns as values")
        arrays = (values.detach().float().numpy(), indices.numpy(), indptr.numpy())
        graph = Graph(_places(sp.csr_array(arrays, shape=self._shape), self._shape, is_sorted=True))
        self._replace(graph, self.values.detach().new_zeros(values.numel()))

    def extra_repr(self) -> str:
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{sizes}, density={self.density:.3g}, bias={self.bias is not None}"


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
    """

    name: str
    kind: str
    is_sparse: bool
    reason: str
    weights: int
    nonzeros: int
    kept: int

    def __str__(self) -> str:
        now = f"sparse, {self.kept} of {self.weights} weights" if self.is_sparse else "dense"
        return f"{self.name or 'the model'} ({self.kind}): {now}, {self.reason}"


def sparsify_(
    model: nn.Module,
    density: float | None = None,
    *,
    keep: str | None = None,
    skip: Collection[str] = (),
    report: list[LayerChange] | None = None,
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

    Returns
    -------
    torch.nn.Module
        The model; the new layer where it is one itself. Make the optimizer afterwards: parameters are new.

    Raises
    ------
    ArgumentError
        No layer has a name of `skip`; two modules share a weight, which they would not any more; a density where
        nonzeros are kept, or none for the largest weights.

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
    if not isinstance(model, nn.Module) or isinstance(skip, str):
        description = f"skip={skip!r}" if isinstance(skip, str) else type(model).__name__
        raise ArgumentTypeError(f"sparsify_ takes a torch.nn.Module, and a list of names to skip; found {description}")
    layers = {name: m for name, m in model.named_modules() if _is_linear(m)}
    skippable = _other_layers(model, layers)
    unknown = sorted(set(skip) - set(layers) - set(skippable))
    if unknown:
        raise ArgumentError(f"skip has {unknown[0]!r}; the linear layers are {', '.join(layers) or 'none'}")
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


def _is_trained(layer: nn.Module, name: str) -> bool:
    """Return whether a tensor of a layer is trained, or what pruning or a parametrization makes it of."""
    heads = (f"parametrizations.{name}.", f"{name}_orig")
    return any(p.requires_grad for n, p in layer.named_parameters() if n == name or n.startswith(heads))


def _check_keep(density: float | None, keep: str | None) -> None:
    if density is not None:
        _check_share("density", density)
    if keep not in (None, "largest", "nonzeros"):
        raise ArgumentError(f"keep: expected 'largest' or 'nonzeros', got {keep!r}.")
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


# ------------------------------------------------------------------ masks


def _check_layer(inputs: Any, outputs: Any, dtype: Any) -> None:
    for name, size in (("in_features", inputs), ("out_features", outputs)):
        if not isinstance(size, (int, np.integer)) or size < 0:
            raise ArgumentError(f"{name} is a number of features, found {shown(size)}")
    if dtype not in NAMES:
        raise ArgumentTypeError(f"the weights are of one of {', '.join(map(str, NAMES))}; found {dtype}")


def _check_share(name: str, share: Any) -> None:
    if not isinstance(share, (int, float, np.number)) or not 0 <= share <= 1:
        raise ArgumentError(f"{name} is a share in [0, 1], found {share!r}")


def _drawn(shape: tuple[int, int], density: float) -> sp.csr_array:
    """Draw places at random."""
    _check_share("density", density)
    seed = int(torch.randint(2**31, (), device="cpu").item())
    total = math.prod(shape)
    positions = np.sort(np.random.default_rng(seed).choice(total, round(density * total), replace=False))
    rows, columns = np.divmod(positions, max(shape[1], 1))
    indptr = np.append(0, np.cumsum(np.bincount(rows, minlength=shape[0])))
    return sp.csr_array((np.ones(positions.size, bool), columns, indptr), shape=shape)


def _largest(weight: Tensor, density: float) -> Tensor:
    """Return a mask of the largest weights."""
    _check_share("density", density)
    mask = torch.zeros(weight.numel(), dtype=torch.bool)
    mask[torch.topk(weight.abs().float().flatten(), round(density * weight.numel())).indices] = True
    return mask.view_as(weight)


def _places(mask: Any, shape: tuple[int, int], *, is_sorted: bool = False) -> Any:
    """Return a structure that lists each place once, rows in order."""
    if isinstance(mask, (Tensor, np.ndarray)) and not getattr(mask, "is_sparse", False):
        if not isinstance(mask, Tensor) or mask.layout is torch.strided:
            mask = torch.as_tensor(array_of_numbers(mask, "mask") != 0)
    graph = Graph(mask)
    if graph.shape != shape:
        raise ArgumentError(f"the mask has shape {list(graph.shape)}, expected {list(shape)}, outputs by inputs")
    columns, rows = graph.edge_index.numpy()
    keys = rows * max(shape[1], 1) + columns
    if is_sorted and not graph.is_sorted:
        raise ArgumentError("the columns of each row must ascend")
    if np.any(np.diff(keys) == 0):
        raise ArgumentError("the mask lists a place twice: make it canonical, as sum_duplicates() does")
    return sp.csr_array((np.ones(keys.size, bool), graph.rows.indices, graph.rows.indptr), shape=shape)


__all__ = ["LayerChange", "SparseLinear", "sparsify_"]
