# SPDX-License-Identifier: Apache-2.0
"""Models and training modules from torch, with operations of graphs and layers of this package.

Operations of `sparsetir.torch.Graph`, and layers such as `SparseLinear`, in models that are traced for Relax.

torch sees each as one call of ``sparsetir::along_rows`` with the name of a method. While `from_torch` traces a model,
such a call is written with the operators of `register_torch_ops` instead, which stay sparse. The structure is constant.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import math
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tvm import ir, relax
from tvm.error import InternalError

from sparsetir.errors import ArgumentError, ArgumentTypeError, LoweringError, SparseTIRError
from sparsetir.relax.model import CompiledModel, Passes, compile_model
from sparsetir.relax.torch_import.importer import Nesting, TracedValues, explained, imported, tracing
from sparsetir.relax.torch_import.operators import NAMESPACE, register_torch_ops, without_gradient
from sparsetir.utils.arguments import as_mapping, as_sequence, shown

# Import a torch module as a Relax function of its parameters, for training.


def is_module(model: Any) -> bool:
    """Return whether a model is a torch module."""
    return any(base.__module__ == "torch.nn.modules.module" for base in type(model).__mro__)


def from_module(
    model: Any, args: Sequence[Any] | None, kwargs: Mapping[str, Any] | None, static: Collection[str]
) -> tuple[ir.IRModule, dict[str, Any], list[str]]:
    """Import a module in its current mode, and return the function, the values of its tensors, and the untrained names.

    Parameters
    ----------
    model : torch.nn.Module
    args, kwargs, static
        As for `sparsetir.relax.train_step`.
    """
    torch = importlib.import_module("torch")
    positional, keywords = _examples(torch, model, args, kwargs)
    _check_dense(torch, model)
    _check_averages(torch, model)
    copied = copy.deepcopy(model)
    whole, inputs, keywords, context = with_fixed(copied, positional, keywords, static)
    for module, original in zip(copied.modules(), model.modules(), strict=True):
        module.training = original.training  # `with_fixed` has set eval mode.
    with torch.enable_grad(), explained(), context:
        exported = torch.export.export(whole, inputs, keywords)
    _end_gradients(torch, exported)
    prefix = "model." if static_names(static) else ""
    targets = {spec.arg.name: spec.target for spec in exported.graph_signature.input_specs if spec.target is not None}
    mod, detached = relax.frontend.detach_params(imported(exported, keeps_params=True))
    func = mod["main"]
    first = len(func.params) - len(detached.get("main", ()))
    names = [str(targets[str(p.name)]).removeprefix(prefix) for p in func.params[first:]]
    names = first_names(model, names)
    values = dict(zip(names, detached.get("main", ()), strict=True))
    named = _named(func, first, names)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    trained &= _with_gradients(named)
    return ir.IRModule({"main": named}), values, [name for name in values if name not in trained]


VIEWS = {
    f"aten::{name}"
    for name in (
        *("view", "reshape", "select", "slice", "transpose", "permute", "t"),
        *("unsqueeze", "squeeze", "expand", "alias"),
    )
}


def _end_gradients(torch: Any, exported: Any) -> None:
    """Mark in a traced model where torch ends gradients, because decompositions forget about it.

    They end at ``detach``, behind what is computed under ``torch.no_grad``, and at the padding rows of embeddings.

    Raises
    ------
    ArgumentError
        A tensor from outside is changed in place under ``torch.no_grad``.
    """
    aten, marker, switch = torch.ops.aten, without_gradient(), torch.ops.higher_order.wrap_with_set_grad_enabled
    for module in exported.graph_module.modules():
        graph: Any = getattr(module, "graph", None)
        for node in list(graph.nodes) if graph is not None else ():
            if node.target is switch and not node.args[0]:
                _check_unchanged(getattr(module, node.args[1].target))
                for result in list(node.users):
                    _mark(graph, result, marker)
            elif node.target in (aten.detach.default, aten.detach_.default):
                marked = _mark(graph, node, marker)
                if node.target is aten.detach_.default:
                    node.args[0].replace_all_uses_with(marked, lambda user, own=marked: own < user)
            elif node.target is aten.embedding.default and len(node.args) > 2 and node.args[2] >= 0:
                _keep_padding(graph, node, aten, marker)
        if graph is not None:
            module.recompile()


def _mark(graph: Any, node: Any, marker: Any) -> Any:
    """Let all that use a node use it without gradients."""
    with graph.inserting_after(node):
        marked = graph.call_function(marker, (node,))
    marked.meta = dict(node.meta)
    node.replace_all_uses_with(marked, lambda user: user is not marked)
    return marked


def _keep_padding(graph: Any, node: Any, aten: Any, marker: Any) -> None:
    """Give the row of an embedding's padding no gradient."""
    users, (_, index, padding) = list(node.users), node.args[:3]
    with graph.inserting_after(node):
        fixed = graph.call_function(marker, (node,))
    with graph.inserting_after(fixed):
        is_padding = graph.call_function(aten.eq.Scalar, (index, padding))
    with graph.inserting_after(is_padding):
        mask = graph.call_function(aten.unsqueeze.default, (is_padding, -1))
    with graph.inserting_after(mask):
        rows = graph.call_function(aten.where.self, (mask, fixed, node))
    fixed.meta, rows.meta = dict(node.meta), dict(node.meta)
    for user in users:
        user.replace_input_with(node, rows)


def _check_unchanged(region: Any) -> None:
    """Raise if a region without gradients changes floats from outside in place, whose gradients torch keeps."""
    for node in region.graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if schema is None or not schema.is_mutable or not node.args:
            continue
        changed = node.args[0]
        while changed.op == "call_function" and operator_name(changed.target) in VIEWS:
            changed = changed.args[0]
        tensor = changed.meta.get("val")
        if changed.op == "placeholder" and tensor is not None and tensor.is_floating_point():
            fault = "the model changes a tensor in place under torch.no_grad"
            raise ArgumentError(f"{fault}, whose gradient would be another one: compute a new tensor there")


def _with_gradients(func: relax.Function) -> set[str]:
    """Return the names of variables that the results depend on, other than behind the end of gradients.

    torch leaves other parameters as they are, where an optimizer would shrink them by weight decay.
    """
    before: dict[str, set[str]] = {}
    for block in func.body.blocks:
        for binding in block.bindings:
            value, is_float = binding.value, "float" in str(binding.var.ty)
            is_end = isinstance(value, ir.Call) and value.op == ir.Op.get("relax.grad.no_grad")
            before[str(binding.var.name)] = _names_in(value) if is_float and not is_end else set()
    reached, ahead = set(), _names_in(func.body.body)
    while ahead:
        reached |= ahead
        ahead = set().union(*(before.get(name, ()) for name in ahead)) - reached
    return reached


def _names_in(expr: Any) -> set[str]:
    return {str(var.name) for var in relax.analysis.free_vars(expr)}


def first_names(model: Any, names: Sequence[str]) -> list[str]:
    """Return the names of tensors, for tied parameters the first one, as torch lists them."""
    first: dict[int, str] = {}
    every = {name: first.setdefault(id(p), name) for name, p in model.named_parameters(remove_duplicate=False)}
    return [every.get(name, name) for name in names]


def _check_dense(torch: Any, model: Any) -> None:
    """Raise for sparse or pruned weights, which training would not keep sparse."""
    prune = importlib.import_module("torch.nn.utils.prune")
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.layout != torch.strided:
            fault = f"{name} is sparse ({tensor.layout}), which torch.export does not take"
            raise ArgumentError(f"{fault}: train it with sparsetir.torch.SparseLinear, or write the model in Relax")
    if prune.is_pruned(model):
        fault = "the model is pruned by hooks of torch.nn.utils.prune, which would not hold its zeros"
        raise ArgumentError(f"{fault}: make its layers sparse with sparsetir.torch.sparsify_ and train them in torch")


def _check_averages(torch: Any, model: Any) -> None:
    """Raise for cumulative averages (momentum None), whose share of a batch changes from step to step."""
    for name, module in model.named_modules():
        is_norm = isinstance(module, torch.nn.modules.batchnorm._BatchNorm) and module.training
        if is_norm and module.track_running_stats and module.momentum is None:
            fault = f"{name or 'the model'} is a batch norm with momentum=None, an average over all steps"
            raise ArgumentError(f"{fault}: give it a momentum, such as 0.1")


def _named(func: relax.Function, first: int, names: Sequence[str]) -> relax.Function:
    """Rename the function's parameters to torch's names; those of the same name become one."""
    new = {name: relax.Var(name, p.ty) for name, p in zip(names, func.params[first:], strict=True)}
    bound = func.bind_params({p: new[name] for name, p in zip(names, func.params[first:], strict=True)})
    return relax.Function([*bound.params, *new.values()], bound.body, func.ret_ty, func.is_pure)


# Compile models from torch: trace by ``torch.export``, compile, and call with torch tensors.


def from_torch(
    model: Any,
    example_args: Sequence[Any] | None = None,
    *,
    example_kwargs: Mapping[str, Any] | None = None,
    dynamic_shapes: Any = None,
    static: Collection[str] = (),
    sparsify: Passes = None,
    database: str | Path | None = None,
    target: Any = None,
) -> CompiledModel:
    """Compile a torch model to a `CompiledModel`, with sparse kernels for its sparse operators.

    A module is traced in eval mode, and is not modified. Sparse parameters and buffers (CSR, CSC, COO, BSR) are traced
    as dense ones, because torch cannot export them. A pass given as `sparsify` makes them sparse again, and makes
    pruned dense weights sparse. Operators of `register_torch_ops` stay sparse throughout. So do layers of
    `sparsetir.torch.SparseLinear`, sparse ones of `sparsetir.torch.PrunedLinear`, which compute in the dtype of their
    inputs, and ``linear``, ``spmm``, ``conv``, ``softmax``, ``sddmm`` and ``attention`` of a
    `sparsetir.torch.Graph` that the model stores, whose structures become constants.

    Parameters
    ----------
    model : torch.nn.Module or torch.export.ExportedProgram
    example_args : sequence, optional
        Arguments to trace a module with; the tensors among them are dense.
    example_kwargs : mapping, optional
        Keyword arguments to trace a module with.
    dynamic_shapes : optional
        Sizes that may change from call to call, as ``torch.export.export`` takes them, such as
        ``({0: torch.export.Dim("batch")},)``.
    static : collection of str, optional
        Names of arguments that always equal the examples: they become constants, and the compiled model is called
        without them. Message passing along a constant index is a sparse product. An index that is a buffer of the
        module is constant, too.
    sparsify : Pass or sequence of Pass, optional
        Passes that run on the model before it is lowered.
    database : str or Path, optional
        Records of `sparsetir.tune_sparse`.
    target : Target, str or dict, optional
        An LLVM target; this machine by default.

    Returns
    -------
    CompiledModel
        The model, called like the module, with the same nesting of arguments and results.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        The class of the model is not supported, it modifies its own buffers, or the example arguments are sparse.
    LoweringError
        An operation of the model is not supported, such as other operations of a `Graph`; or results for the examples
        are not those of torch.
    """
    exported = _exported(model, example_args, example_kwargs, dynamic_shapes, static)
    nesting = Nesting.of(exported)
    module = imported(exported)
    try:
        compiled = compile_model(module, target, sparsify=sparsify, database=database, nesting=nesting)
    except SparseTIRError:
        raise
    except (InternalError, TypeError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        message = f"TVM does not compile an operator of the model: {reason}"
        raise LoweringError(f'{message}; leave the model to torch.compile(model, backend="sparsetir")') from error
    if target is None:
        _check_results(compiled, exported, EXACT if sparsify is None else ROUNDED)
    return compiled


# Of the largest element of a result, that it may be off: by rounding in float32, in halves, and by 8 bits.
EXACT, HALVED, ROUNDED = 0.05, 0.3, 0.5
TINY = 1e-6  # that any result may be off
# Operators that jump, so that a rounding, or which of two equal elements comes first, may decide about a result.
CONVERSIONS = {"_to_copy", "to"}  # which jump where floats become integers
JUMPS = {"topk", "sort", "argsort", "argmax", "argmin", "median", "round", "floor", "ceil", "trunc", "sign"}
JUMPS |= {
    "floor_divide",
    "remainder",
    "fmod",
    "searchsorted",
    "bucketize",
    "max",
    "min",
    "eq",
    "ne",
    "gt",
    "ge",
    "lt",
    "le",
}


def _check_results(compiled: CompiledModel, exported: Any, tolerance: float) -> None:
    """Raise where results for the examples are not torch's: an operator was imported as another one.

    Where the model has operators that jump, other results need no fault, and only lead to a warning.
    """
    torch = importlib.import_module("torch")
    random = torch.Tag.nondeterministic_seeded
    if exported.example_inputs is None or any(random in getattr(n.target, "tags", ()) for n in exported.graph.nodes):
        return
    tree = importlib.import_module("torch.utils._pytree")
    own_copy = lambda leaf: leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf  # noqa: E731
    arguments, keywords = tree.tree_map(own_copy, exported.example_inputs)
    try:
        with torch.no_grad():
            expected = exported.module()(*arguments, **keywords)
    except Exception:  # of examples that only stand for others, such as empty ones
        return
    allowed = max(tolerance, HALVED if _has_halves(torch, exported) else 0.0)
    pairs = zip(tree.tree_leaves(compiled(*arguments, **keywords)), tree.tree_leaves(expected), strict=True)
    for number, (own, theirs) in enumerate(pairs):
        fault = _difference(own, theirs, allowed) if isinstance(theirs, torch.Tensor) else ""
        if not fault:
            continue
        fault = f"model: result {number} of the examples {fault}"
        is_same_kind = own.dtype == theirs.dtype and own.shape == theirs.shape
        if is_same_kind and any(_jumps(node) for node in exported.graph.nodes):
            why = "a rounding may have decided otherwise, or an operator was imported as another one"
            warnings.warn(f"{fault}: {why}. Compare results for examples without ties.", stacklevel=3)
            return
        how = "Report it, with the model, as an error of this package"
        raise LoweringError(f"{fault}: an operator was imported as another one. {how}.")


def _difference(own: Any, theirs: Any, allowed: float) -> str:
    """Return how a result differs from torch's by more than a share of the largest number; empty where it does not."""
    if own.dtype != theirs.dtype or own.shape != theirs.shape:
        kinds = [f"{str(t.dtype).removeprefix('torch.')} of shape {tuple(t.shape)}" for t in (own, theirs)]
        return f"is {kinds[0]}, where torch's is {kinds[1]}"
    if not theirs.numel() or theirs.dtype.is_complex:
        return ""
    if not theirs.is_floating_point():
        unlike = int((own != theirs).sum())
        return f"differs at {unlike} of {theirs.numel()} elements from torch's" if unlike else ""
    is_finite = theirs.isfinite()
    right, ours = theirs[is_finite].double(), own[is_finite].double()
    largest = float(right.abs().max()) if right.numel() else 0.0
    off = float((right - ours).abs().max()) if right.numel() else 0.0
    if not off <= allowed * largest + TINY:
        return f"is off by {off:.3g}, where torch's largest is {largest:.3g}"
    others, ours = theirs[~is_finite], own[~is_finite]
    is_alike = (others == ours) | (others.isnan() & ours.isnan())
    return "" if bool(is_alike.all()) else "is another one where torch's is infinite or NaN"


def _has_halves(torch: Any, exported: Any) -> bool:
    """Return whether a model computes with 16-bit floats."""
    values = (node.meta.get("val") for node in exported.graph.nodes)
    return any(isinstance(v, torch.Tensor) and v.dtype in (torch.float16, torch.bfloat16) for v in values)


def _jumps(node: Any) -> bool:
    """Return whether a node of a graph is an operator that jumps, of floats."""
    name = str(node.target).removeprefix("aten.").partition(".")[0]
    of_floats = any(_is_of_floats(value.meta.get("val")) for value in node.all_input_nodes)
    return of_floats and (name in JUMPS or (name in CONVERSIONS and not _is_of_floats(node.meta.get("val"))))


def _is_of_floats(value: Any) -> bool:
    return hasattr(value, "is_floating_point") and value.is_floating_point()


def _exported(model: Any, args: Any, kwargs: Any, dynamic_shapes: Any, static: Collection[str]) -> Any:
    torch = importlib.import_module("torch")
    if isinstance(model, torch.export.ExportedProgram):
        if args is not None or kwargs is not None or dynamic_shapes is not None or static_names(static):
            fault = "an ExportedProgram is traced already"
            raise ArgumentTypeError(f"{fault}: pass no examples, no dynamic_shapes and nothing static")
        return model
    if not isinstance(model, torch.nn.Module):
        raise ArgumentTypeError(f"expected a torch.nn.Module or an ExportedProgram, got {type(model).__name__}")
    positional, keywords = _examples(torch, model, args, kwargs)
    for name, value in [*((f"example_args[{n}]", v) for n, v in enumerate(positional)), *keywords.items()]:
        if isinstance(value, torch.Tensor) and value.layout != torch.strided:
            hint = "pass its values and index arrays, for operators of sparsetir.relax.register_torch_ops()"
            raise ArgumentTypeError(f"{name} is sparse ({value.layout}), which torch.export does not take: {hint}")
    model, positional, keywords, values = with_fixed(dense_copy(model), positional, keywords, static)
    with torch.no_grad(), explained(), values, _written():
        return torch.export.export(model, positional, keywords, dynamic_shapes=dynamic_shapes)


def _examples(torch: Any, model: Any, args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments to trace a module with, by position and by name."""
    if args is None and kwargs is None:
        raise ArgumentTypeError("a module is traced with arguments: pass example_args, a tuple of tensors")
    if isinstance(args, torch.Tensor):
        raise ArgumentTypeError("example_args is a tuple of arguments, got a tensor: pass (tensor,)")
    positional = () if args is None else tuple(as_sequence(args, "example_args", "a tuple of arguments"))
    keywords = {} if kwargs is None else as_mapping(kwargs, "example_kwargs", "arguments by their names")
    try:
        inspect.signature(model.forward).bind(*positional, **keywords)
    except TypeError as error:
        fault = f"expected arguments that {type(model).__name__}.forward takes, got others ({error})"
        raise ArgumentTypeError(f"example_args: {fault}. Pass one for each of its parameters.") from None
    return positional, keywords


def static_names(static: Any) -> list[str]:
    """Return names of arguments that are fixed; a single text counts as one, which `with_fixed` refuses."""
    names = [static] if isinstance(static, str) else as_sequence(static, "static", "names of arguments")
    strange = next((name for name in names if not isinstance(name, str)), None)
    if strange is not None or None in names:
        raise ArgumentTypeError(f"static: expected names of arguments, got {shown(strange)}. Pass strings.")
    return names


def with_fixed(
    model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], static: Collection[str]
) -> tuple[Any, tuple[Any, ...], dict[str, Any], AbstractContextManager[Any]]:
    """Return a module with some arguments fixed, the other arguments, and a context to trace the module in.

    Fixed tensors become buffers of the module.
    """
    names = static_names(static)
    if not names:
        return model, args, kwargs, nullcontext()
    torch = importlib.import_module("torch")
    whole = inspect.signature(model.forward)
    bound = whole.bind(*args, **kwargs).arguments
    unknown = [name for name in names if name not in bound]
    if isinstance(static, str) or unknown:
        unknown_name = static if isinstance(static, str) else unknown[0]
        raise ArgumentError(
            f"static has {unknown_name!r}, expected some of [{', '.join(bound)}], the arguments in the examples"
        )
    open_ = [name for name in bound if name not in names]
    values = TracedValues({name: bound[name] for name in names if isinstance(bound[name], torch.Tensor)})

    class Fixed(torch.nn.Module):  # type: ignore[name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.model = model
            for name in names:
                self.register_buffer(f"fixed_{name}", bound[name])

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            fixed = {name: getattr(self, f"fixed_{name}") for name in names}
            values.note(fixed)
            return model(**dict(zip(open_, args, strict=False)), **kwargs, **fixed)

    open_params = [p for name, p in whole.parameters.items() if name in open_]
    self_param = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    Fixed.forward.__signature__ = inspect.Signature([self_param, *open_params])  # type: ignore[attr-defined]
    return (
        Fixed().eval(),
        tuple(v for n, v in bound.items() if n in open_ and n not in kwargs),
        {n: v for n, v in kwargs.items() if n in open_},
        tracing(values),
    )


def dense_copy(model: Any) -> Any:
    """Return a module in eval mode with sparse tensors converted to dense ones; dense tensors are shared."""
    torch = importlib.import_module("torch")
    memo: dict[int, Any] = {}
    for tensor in _tensors_of(model):
        if tensor.layout == torch.strided:
            memo[id(tensor)] = tensor
            continue
        dense = tensor.detach().to_dense()
        is_parameter = isinstance(tensor, torch.nn.Parameter)
        memo[id(tensor)] = torch.nn.Parameter(dense, requires_grad=False) if is_parameter else dense
    return with_pruned_weights(_with_exportable_layers(copy.deepcopy(model, memo).eval()))


def _with_exportable_layers(model: Any) -> Any:
    """Return a module whose layers for inference, such as `sparsetir.torch.PrunedLinear`, are ones that TVM imports."""
    layers = {id(m): m.for_export() for m in model.modules() if hasattr(m, "for_export")}
    for module in list(model.modules()):
        for name, child in module._modules.items():
            if id(child) in layers:
                module._modules[name] = layers[id(child)]
    return layers.get(id(model), model)


def with_pruned_weights(model: Any) -> Any:
    """Return a copy of the module with pruned weights in place of the hooks of ``torch.nn.utils.prune``.

    `torch.nn.utils.prune.remove` would modify the tensors too, which the original shares.
    """
    torch = importlib.import_module("torch")
    prune = importlib.import_module("torch.nn.utils.prune")
    for module in model.modules():
        for key, hook in list(module._forward_pre_hooks.items()):
            if not isinstance(hook, prune.BasePruningMethod):
                continue
            name = hook._tensor_name
            with torch.no_grad():
                weight = hook.apply_mask(module).detach().clone()
            del module._forward_pre_hooks[key], module._parameters[f"{name}_orig"], module._buffers[f"{name}_mask"]
            vars(module).pop(name, None)
            module.register_parameter(name, torch.nn.Parameter(weight, requires_grad=False))
    return model


def _written() -> Any:
    """Return a context in which functions are traced as operators that Relax has.

    ``torch.sparse.mm`` is ``torch.mm``: of dense matrices it would fix the sizes to be traced.
    """
    torch = importlib.import_module("torch")

    class Written(torch.overrides.TorchFunctionMode):  # type: ignore[name-defined]
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.sparse.mm and len(args) == 2 and not kwargs:
                return torch.mm(*args)
            function = along_rows if operator_name(func) == ALONG_ROWS else func
            return function(*args, **(kwargs or {}))

    return Written()


def _tensors_of(model: Any) -> Iterator[Any]:
    """Iterate over parameters, buffers, and tensors that are plain attributes."""
    torch = importlib.import_module("torch")
    for module in model.modules():
        attributes = (*module._parameters.values(), *module._buffers.values(), *vars(module).values())
        yield from (value for value in attributes if isinstance(value, torch.Tensor))


# ------------------------------------------------------------------------------ layers of this package


ALONG_ROWS = f"{NAMESPACE}::along_rows"


def operator_name(func: Any) -> str:
    """Return the name of a torch operator without its overload, or an empty string for any other function."""
    return str(getattr(func, "_qualified_op_name", "") or getattr(func, "_name", "")).partition(".")[0]


def along_rows(
    indptr: Any,
    indices: Any,
    rows: int,
    columns: int,
    there: Any,
    back: Any,
    method: str,
    tensors: list[Any],
    reduce: str = "",
    scale: float | None = None,
    dropout: float = 0.0,
    activation: str = "",
    precision: str = "",
) -> Any:
    """Write a method of a graph with the operators of `register_torch_ops`.

    Raises
    ------
    LoweringError
        The method, its dropout or precision is not supported in a model for `from_torch`.
    """
    if method not in METHODS or dropout or precision:
        description = f"{method} with dropout" if dropout else f"{method} with a precision" if precision else method
        raise LoweringError(
            f"Graph.{description}: expected one of {', '.join(METHODS)} in a model for from_torch. Write it with these."
        )
    graph = TracedRows(indptr, indices, rows, columns, there, back)
    if method == "spmm":
        x, weight, *bias = tensors
        y = graph.spmm(x, weight, reduce or "sum")
        y = y if not bias or bias[0] is None else y + bias[0]
        return y.relu() if activation else y
    return graph.attention(*tensors, scale=scale) if method == "attention" else METHODS[method](graph, *tensors)


@dataclass(frozen=True)
class TracedRows:
    """The structure of a graph, as torch traces it."""

    indptr: Any
    indices: Any
    rows: int
    columns: int
    there: Any
    back: Any

    def by_rows(self, edges: Any) -> Any:
        """Permute values of edges into row order."""
        return edges if self.there is None else edges.index_select(0, self.there)

    def as_given(self, edges: Any) -> Any:
        """Permute values of edges from row order into the order in which the graph was given."""
        return edges if self.back is None else edges.index_select(0, self.back)

    def linear(self, values: Any, x: Any) -> Any:
        return register_torch_ops().linear(x, self.by_rows(values), self.indptr, self.indices)

    def spmm(self, x: Any, weight: Any, reduce: str = "sum") -> Any:
        edges = x.new_ones(self.indices.shape[0]) if weight is None else self.by_rows(weight)
        return self._sums(edges, x, reduce)

    def _sums(self, edges: Any, x: Any, reduce: str) -> Any:
        torch, operators = importlib.import_module("torch"), register_torch_ops()
        if edges.dim() == 2:
            heads = range(edges.shape[1])
            return torch.stack([self._sums(edges[:, h].contiguous(), x[:, h], reduce) for h in heads], dim=1)
        flat = x.reshape(self.columns, math.prod(x.shape[1:]))
        if reduce in ("sum", "mean"):
            y = operators.spmm(edges, self.indptr, self.indices, flat)
            counts = (self.indptr[1:] - self.indptr[:-1]).clamp(min=1).to(y.dtype) if reduce == "mean" else None
            y = y if counts is None else y / counts.unsqueeze(1)
        else:
            values = flat.index_select(0, self.indices) * edges.unsqueeze(1)
            y = operators.segment_reduce(values, self.indptr, reduce)
        return y.reshape(self.rows, *x.shape[1:])

    def softmax(self, scores: Any) -> Any:
        return self.as_given(self._shares(self.by_rows(scores)))

    def sddmm(self, q: Any, k: Any) -> Any:
        return self.as_given(self._scores(q, k))

    def attention(self, q: Any, k: Any, v: Any, *edges: Any, scale: float | None = None) -> Any:
        scores = self._scores(q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
        scores = scores + self.by_rows(edges[0]) if edges and edges[0] is not None else scores
        return self._sums(self._shares(scores), v, "sum")

    def _shares(self, scores: Any) -> Any:
        operators = register_torch_ops()
        return _each_head(lambda s: operators.softmax(s, self.indptr), 1, scores)

    def _scores(self, q: Any, k: Any) -> Any:
        operators = register_torch_ops()
        ones = q.new_ones(self.indices.shape[0])
        return _each_head(lambda a, b: operators.sddmm(ones, self.indptr, self.indices, a, b), 2, q, k)


def _each_head(compute: Callable[..., Any], rank: int, *tensors: Any) -> Any:
    """Apply `compute` to tensors of a given rank, or to each head (dimension 1) of tensors with one dimension more."""
    if tensors[0].dim() == rank:
        return compute(*tensors)
    torch = importlib.import_module("torch")
    heads = range(tensors[0].shape[1])
    return torch.stack([compute(*(t[:, h].contiguous() for t in tensors)) for h in heads], dim=1)


METHODS: dict[str, Callable[..., Any]] = {
    "linear": TracedRows.linear,
    "spmm": TracedRows.spmm,
    "softmax": TracedRows.softmax,
    "sddmm": TracedRows.sddmm,
    "attention": TracedRows.attention,
}


__all__ = [
    "ALONG_ROWS",
    "along_rows",
    "dense_copy",
    "first_names",
    "from_module",
    "from_torch",
    "is_module",
    "operator_name",
]
