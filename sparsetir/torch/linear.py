# SPDX-License-Identifier: Apache-2.0
"""Linear layers whose weights are sparse while they are trained."""

from __future__ import annotations

import math
from contextlib import suppress
from typing import Any

import numpy as np
import scipy.sparse as sp
from torch.nn.utils.prune import BasePruningMethod

import torch
from sparsetir.errors import ArgumentError, ArgumentTypeError, LoweringError
from sparsetir.interop import array_of_numbers
from sparsetir.ir.halves import check_precision
from sparsetir.torch.functions import NAMES, in_autocast
from sparsetir.torch.graph import Graph, check_layer_operand
from sparsetir.utils.arguments import as_count, as_flag, shown
from torch import Tensor, nn

Array = np.ndarray
MAX_FEATURES = 1 << 31
STRUCTURE = ("crow_indices", "col_indices")


class _Weight(sp.csr_array):
    """A weight in scipy that functions of torch refuse with a reason.

    Layers of torch that look for a fast path check whether weights are plain tensors; this one is not.
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
        The share of weights that are stored, in [0, 1]; their places are drawn (from torch's generator).
    bias : bool
    mask : sparse matrix, Tensor or ndarray, optional
        The places instead: those of a matrix [out, in] that are not zero, of a sparse one those it stores.
    dtype : torch.dtype, optional
        Default: torch's.
    precision : {"bf16x3"}, optional
        Of float32 layers: products and their gradients are computed by three products of bfloat16 numbers, as
        `sparsetir.ops.spmm` does. Inside autocast, its dtype counts.

    Attributes
    ----------
    values : Parameter
        The weights row after row, [nnz]: what optimizers see. They are drawn as those of ``torch.nn.Linear``, for the
        number of weights that a row has on average.
    bias : Parameter or None
    graph : Graph
        The places.
    precision : str or None
        May be set at any time.

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
    precision: str | None = None  # also of layers that were pickled without one

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        density: float = 0.1,
        bias: bool = True,
        mask: Any = None,
        dtype: torch.dtype | None = None,
        precision: str | None = None,
    ) -> None:
        super().__init__()
        dtype = torch.get_default_dtype() if dtype is None else dtype
        _check_layer(in_features, out_features, dtype)
        check_precision(precision, NAMES[dtype])
        self.precision = precision
        has_bias = as_flag(bias, "bias")
        self.in_features, self.out_features = in_features, out_features
        self.graph = Graph(_drawn(self._shape, density) if mask is None else _places(mask, self._shape))
        self.values = nn.Parameter(torch.empty(self.graph.num_edges, dtype=dtype))
        self.register_parameter("bias", nn.Parameter(torch.empty(out_features, dtype=dtype)) if has_bias else None)
        self.reset_parameters()

    @classmethod
    def from_dense(
        cls, layer: nn.Linear, density: float | None = None, *, mask: Any = None, precision: str | None = None
    ) -> SparseLinear:
        """Return the layer with its largest weights, or those at given places; bias and weights are copied.

        Parameters
        ----------
        layer : torch.nn.Linear
        density : float, optional
            The share of weights to keep. Default: those that are not zero.
        mask : sparse matrix, Tensor or ndarray, optional
        precision : {"bf16x3"}, optional
            As in `SparseLinear`.
        """
        if nn.parameter.is_lazy(layer.weight):
            raise ArgumentError("the layer has no weights yet: call the model once, which makes them")
        weight = effective(layer)
        if mask is None:
            mask = weight != 0 if density is None else _largest(weight, density)
        options: dict[str, Any] = {"bias": layer.bias is not None, "dtype": weight.dtype, "precision": precision}
        sparse = cls(layer.in_features, layer.out_features, mask=mask, **options)
        with torch.no_grad():
            sparse.values.copy_(weight[sparse._rows(), sparse._columns()])
            if sparse.bias is not None:
                sparse.bias.copy_(layer.bias)
                sparse.bias.requires_grad_(_is_trained(layer, "bias"))
            sparse.values.requires_grad_(_is_trained(layer, "weight"))
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
            raise ArgumentError(f"expected a tensor of shape [..., {self.in_features}], got {description}")
        check_layer_operand(x)
        if torch.is_autocast_enabled("cpu"):
            return self._product(*in_autocast(x, self.values, self.bias))
        return self._product(x, self.values, self.bias, self.precision)

    def _product(self, x: Tensor, values: Tensor, bias: Tensor | None, precision: str | None = None) -> Tensor:
        if x.dtype is not values.dtype or x.dtype not in NAMES:
            advice = "convert one of them to the dtype of the other, one of floats"
            raise ArgumentTypeError(f"x is {x.dtype} and the weights are {values.dtype}: {advice}")
        y = self.graph.linear(values, x, precision=precision)
        return y if bias is None else y.add_(bias)

    # ------------------------------------------------------------------ the pattern

    @property
    def density(self) -> float:
        """The share of weights that are stored."""
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
            One that has `values`: its state of each weight is moved along, zero for new ones. `values` stays the same
            Parameter.
        """
        if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
            raise ArgumentTypeError(f"optimizer: expected one of torch.optim, got {shown(optimizer)}.")
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
        check_share("fraction", fraction)
        if scores is not None and not isinstance(scores, Tensor):
            raise ArgumentTypeError(f"scores: expected a tensor, got {type(scores).__name__}.")
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
        arrays = {"crow_indices": indptr, "col_indices": indices, "values": values}
        for name, array in arrays.items():
            if not isinstance(array, Tensor) or array.dim() != 1:
                described = f"shape {list(array.shape)}" if isinstance(array, Tensor) else type(array).__name__
                raise ArgumentError(f"{name}: expected a tensor of one dimension, got {described}")
            if name != "values" and (array.is_floating_point() or array.is_complex() or array.dtype is torch.bool):
                raise ArgumentError(f"{name}: expected integers, got {array.dtype}")
        if indptr.numel() != self.out_features + 1 or indices.shape != values.shape:
            sizes = f"{indptr.numel()} row pointers, {indices.numel()} columns and {values.numel()} values"
            raise ArgumentError(
                f"expected {self.out_features + 1} row pointers, and as many columns as values, got {sizes}"
            )
        if indptr[0] != 0 or indptr[-1] != indices.numel() or bool((indptr[1:] < indptr[:-1]).any()):
            raise ArgumentError(f"crow_indices: expected numbers that ascend from 0 to {indices.numel()}")
        stored = (np.ones(indices.numel(), bool), indices.numpy(), indptr.numpy())
        graph = Graph(_places(sp.csr_array(stored, shape=self._shape), self._shape, is_sorted=True))
        self._replace(graph, self.values.detach().new_zeros(values.numel()))

    def extra_repr(self) -> str:
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        precision = f", precision={self.precision}" if self.precision else ""
        return f"{sizes}, density={self.density:.3g}, bias={self.bias is not None}{precision}"


def effective(module: nn.Module, name: str = "weight") -> Tensor:
    """Return a weight as a module computes with it, after pruning hooks and parametrizations."""
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, BasePruningMethod):
            hook(module, None)  # Each pass computes the weight; an optimizer may have changed its origin.
    return getattr(module, name).detach()


def _is_trained(layer: nn.Module, name: str) -> bool:
    """Return whether a tensor of a layer is trained, or is made from a trained one by pruning or a parametrization."""
    heads = (f"parametrizations.{name}.", f"{name}_orig")
    return any(p.requires_grad for n, p in layer.named_parameters() if n == name or n.startswith(heads))


# ------------------------------------------------------------------ masks


def _check_layer(inputs: Any, outputs: Any, dtype: Any) -> None:
    for name, size in (("in_features", inputs), ("out_features", outputs)):
        as_count(size, name, least=0, most=MAX_FEATURES)
    if not isinstance(dtype, torch.dtype) or dtype not in NAMES:
        raise ArgumentTypeError(f"the weights are of one of {', '.join(map(str, NAMES))}, got {shown(dtype)}")


def check_share(name: str, share: Any) -> None:
    """Raise unless the value is a share in [0, 1]."""
    if not isinstance(share, (int, float, np.number)) or not 0 <= share <= 1:
        raise ArgumentError(f"{name} is a share in [0, 1], got {shown(share)}")


def _drawn(shape: tuple[int, int], density: float) -> sp.csr_array:
    """Draw places at random."""
    check_share("density", density)
    seed = int(torch.randint(2**31, (), device="cpu").item())
    total = math.prod(shape)
    positions = np.sort(np.random.default_rng(seed).choice(total, round(density * total), replace=False))
    rows, columns = np.divmod(positions, max(shape[1], 1))
    indptr = np.append(0, np.cumsum(np.bincount(rows, minlength=shape[0])))
    return sp.csr_array((np.ones(positions.size, bool), columns, indptr), shape=shape)


def _largest(weight: Tensor, density: float) -> Tensor:
    """Return a mask of the largest weights."""
    check_share("density", density)
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


__all__ = ["SparseLinear", "check_share", "effective"]
