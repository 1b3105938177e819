# SPDX-License-Identifier: Apache-2.0
"""Import of exported torch programs as Relax modules: TVM's importer with more converters, and fixed arguments."""

from __future__ import annotations

import importlib
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from tvm import ir

from sparsetir.errors import ArgumentError, ArgumentTypeError, LoweringError, SparseTIRError
from sparsetir.relax.torch_import.converters import converters
from sparsetir.relax.torch_import.graphs import with_sparse_products
from sparsetir.utils.caches import cached_property

COUNTER = "num_batches_tracked"
# Operators that torch writes with simpler ones, besides those that an export decomposes anyway.
DECOMPOSED = (
    "adaptive_max_pool2d.default",
    "grid_sampler_2d.default",
    "dist.default",
    "addmv.default",
    "addbmm.default",
    *(f"upsample_nearest{n}d.{overload}" for n in (1, 2, 3) for overload in ("default", "vec")),
    *(f"upsample_{kind}.vec" for kind in ("linear1d", "trilinear3d")),
    "_upsample_bilinear2d_aa.default",
)


def imported(exported: Any, *, keeps_params: bool = False) -> ir.IRModule:
    """Import an exported program as a Relax module of tensors; weights become constants.

    With `keeps_params` weights are parameters after the other ones, as TVM's importer attaches them.

    Raises
    ------
    ArgumentError
        The model changes its own buffers or arguments.
    LoweringError
        It has operators that TVM's importer does not know.
    """
    from tvm.relax.frontend.torch import from_exported_program

    program = exported.run_decompositions(_decompositions())
    _refuse_changes(program, keeps_params)
    _drop_constants(program)
    with_sparse_products(program)
    try:
        return from_exported_program(
            program,
            custom_convert_map=converters(),
            run_ep_decomposition=False,
            keep_params_as_input=keeps_params,
        )
    except (SparseTIRError, MemoryError):
        raise
    except Exception as error:  # of TVM: assertions that list the names of unsupported operators, and others
        fault = f"TVM's importer for torch does not take the model: {error}"
        advice = 'replace these operators, or leave them to torch: torch.compile(model, backend="sparsetir")'
        raise LoweringError(f"{fault}; {advice}") from error


def _decompositions() -> dict[Any, Any]:
    """Return torch's own ways to write operators with simpler ones."""
    torch, decomp = importlib.import_module("torch"), importlib.import_module("torch._decomp")
    named = [name.split(".") for name in DECOMPOSED]
    also = decomp.get_decompositions([getattr(getattr(torch.ops.aten, name), overload) for name, overload in named])
    return {**torch.export.default_decompositions(), **also}


def _refuse_changes(program: Any, keeps_averages: bool) -> None:
    """Raise for buffers and arguments that the model mutates, except running averages if `keeps_averages`."""
    signature = program.graph_signature
    nodes = {node.name: node for node in program.graph.nodes}
    changed = signature.buffers_to_mutate
    averages = [name for node, name in changed.items() if keeps_averages and _is_average(nodes[node])]
    refused = [*(name for name in changed.values() if name not in averages), *signature.user_inputs_to_mutate.values()]
    if refused:
        names = ", ".join(map(str, refused))
        raise ArgumentError(f"the model changes {names} when it is called, which a compiled model does not")
    for spec in signature.input_specs:
        if spec.target in averages and not spec.target.endswith(COUNTER):
            spec.kind = type(spec.kind).PARAMETER  # TVM's importer would bind a buffer as a constant.


def _is_average(node: Any) -> bool:
    """Return whether a node is an updated running average of batch normalization, or the count of its batches."""
    if node.target is operator.getitem:
        return str(node.args[0].target) == "aten._native_batch_norm_legit_functional.default" and node.args[1] in (3, 4)
    while str(node.target) == "aten.add.Tensor" and node.args[1] == 1:
        node = node.args[0]
    return node.op == "placeholder" and str(node.target).endswith(COUNTER)


def _drop_constants(program: Any) -> None:
    """Remove arguments and results that are no tensors from a program, since TVM's importer does not take them."""
    graph, signature = program.graph, program.graph_signature
    is_constant = lambda spec: type(spec.arg).__name__ == "ConstantArgument"  # noqa: E731
    fixed = {spec.arg.name for spec in signature.input_specs if is_constant(spec)}
    for node in list(graph.nodes):
        if node.op == "placeholder" and node.name in fixed and not node.users:
            graph.erase_node(node)
    signature.input_specs[:] = [spec for spec in signature.input_specs if not is_constant(spec)]
    output = next(node for node in graph.nodes if node.op == "output")
    are_tensors = [not is_constant(spec) for spec in signature.output_specs]
    output.args = (tuple(value for value, keep in zip(output.args[0], are_tensors, strict=True) if keep),)
    signature.output_specs[:] = [spec for spec, keep in zip(signature.output_specs, are_tensors, strict=True) if keep]


# ------------------------------------------------------------------------------------- fixed arguments


# Nesting of arguments and results of a torch model: tuples, lists, dicts, and values that are no tensors.


@dataclass(frozen=True)
class Nesting:
    """The pytrees of the arguments and results of a model that torch traced.

    Parameters
    ----------
    arguments, results : str
        Trees of ``(args, kwargs)`` and of what is returned, as text.
    fixed : mapping of int to value
        Leaves of the arguments that are no tensors: what they were when the model was traced.
    constants : mapping of int to value
        Leaves of the results that are no tensors.
    """

    arguments: str
    results: str
    fixed: Mapping[int, Any]
    constants: Mapping[int, Any]

    @classmethod
    def of(cls, exported: Any) -> Nesting:
        """Create the nesting from an exported program.

        Raises
        ------
        ArgumentTypeError
            Arguments or results lie in objects of a class that torch cannot write down.
        """
        signature = exported.graph_signature
        inputs = [spec.arg for spec in signature.input_specs if spec.kind.name == "USER_INPUT"]
        outputs = [spec.arg for spec in signature.output_specs if spec.kind.name in ("USER_OUTPUT", "LOSS_OUTPUT")]
        spec = exported.call_spec
        return cls(_as_text(spec.in_spec), _as_text(spec.out_spec), _constants(inputs), _constants(outputs))

    @cached_property
    def _trees(self) -> tuple[Any, Any]:
        loads = _pytree().treespec_loads
        return loads(self.arguments), loads(self.results)

    @cached_property
    def _is_flat(self) -> bool:
        """True if all arguments are positional and none is nested, so that they need not be flattened."""
        tree = self._trees[0]
        return tree.unflatten(list(range(tree.num_leaves))) == (tuple(range(tree.num_leaves)), {})

    def tensors(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """Return the tensors among the arguments of a call, in the order of the compiled function.

        Raises
        ------
        ArgumentTypeError, ArgumentError
            They nest otherwise than those the model was traced with, or another value was fixed then.
        """
        if self._is_flat and not kwargs and not self.fixed and len(args) == self._trees[0].num_leaves:
            return list(args)
        try:
            leaves = self._trees[0].flatten_up_to((tuple(args), dict(kwargs)))
        except ValueError as error:
            description = f"{len(args)} positional arguments and {', '.join(kwargs) or 'no'} keywords"
            raise ArgumentTypeError(
                f"expected arguments as in the trace of the model, got {description}: {error}"
            ) from None
        for at, value in self.fixed.items():
            if type(leaves[at]) is not type(value) or leaves[at] != value:
                raise ArgumentError(f"an argument was {value!r} when the model was traced, got {leaves[at]!r}")
        return [leaf for at, leaf in enumerate(leaves) if at not in self.fixed]

    def restored(self, results: Sequence[Any]) -> Any:
        """Return results in the nesting of the model."""
        remaining = iter(results)
        tree, constants = self._trees[1], self.constants
        return tree.unflatten([constants[n] if n in constants else next(remaining) for n in range(tree.num_leaves)])

    def to_json(self) -> dict[str, Any]:
        """Return the nesting as a dict of JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Nesting:
        """Create the nesting from the result of `to_json`, or from that result after JSON made its keys strings."""
        fixed, constants = ({int(at): value for at, value in data[part].items()} for part in ("fixed", "constants"))
        return cls(data["arguments"], data["results"], fixed, constants)


def _constants(leaves: Sequence[Any]) -> dict[int, Any]:
    return {at: arg.value for at, arg in enumerate(leaves) if type(arg).__name__ == "ConstantArgument"}


def _as_text(spec: Any) -> str:
    """Return a pytree as text, with tuples for the named tuples that functions of torch such as `torch.max` return."""
    spec = _pytree().tree_structure(_with_tuples(spec.unflatten(list(range(spec.num_leaves)))))
    try:
        return _pytree().treespec_dumps(spec)
    except NotImplementedError as error:
        fault = str(error).partition(". ")[0]
        raise ArgumentTypeError(f"model: {fault}. Take and return tensors, tuples, lists and dicts.") from None


def _with_tuples(value: Any) -> Any:
    if type(value).__module__ == "torch.return_types":
        return tuple(map(_with_tuples, value))
    if type(value) in (tuple, list):
        return type(value)(map(_with_tuples, value))
    return {key: _with_tuples(item) for key, item in value.items()} if type(value) is dict else value


def _pytree() -> Any:
    return importlib.import_module("torch.utils._pytree")


# Values that a module computes from fixed arguments, while torch traces it with tensors that have no values.
#
# A layer may read a number, ``int(batch.max()) + 1``, or select by a mask. Whatever is computed from fixed tensors only
# is computed beside the trace, too, and the trace takes numbers and sizes from these values.


CHANGES = {"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__", "__iand__", "__ior__"}
FACTORIES = ("tensor", "zeros", "ones", "full", "arange", "eye", "linspace")
NUMBERS = ("item", "tolist", "__int__", "__float__", "__bool__", "__index__")


class TracedValues:
    """Known values of traced tensors.

    Parameters
    ----------
    held : mapping of str to Tensor
        Values of the fixed tensors.
    """

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        self.torch = torch = importlib.import_module("torch")
        self.held = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        self.tree = importlib.import_module("torch.utils._pytree")
        self.values = torch.utils.weak.WeakIdKeyDictionary()
        self.factories = {getattr(torch, name) for name in FACTORIES}
        self.numbers = {getattr(torch.Tensor, name) for name in NUMBERS}

    def note(self, traced: Mapping[str, Any]) -> None:
        """Record which traced tensors belong to the fixed names."""
        for name, tensor in traced.items():
            if name in self.held:
                self.values[tensor] = self.held[name]

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a function in the trace, and record its value if its arguments have values; return numbers as known."""
        tensors = [leaf for leaf in self._leaves(args, kwargs) if isinstance(leaf, self.torch.Tensor)]
        is_known = all(tensor in self.values for tensor in tensors) if tensors else func in self.factories
        value = self._computed(func, args, kwargs) if is_known else None
        if value is None:
            if _is_change(func, kwargs):
                self._forget(tensors)
            return func(*args, **kwargs)
        if func in self.numbers:
            return value[0]
        traced = func(*args, **kwargs)
        self._note_all(traced, value[0])
        return traced

    def _leaves(self, *nested: Any) -> list[Any]:
        return list(self.tree.tree_leaves(nested))

    def _computed(self, func: Any, args: Any, kwargs: Any) -> tuple[Any] | None:
        """Return the value of a call, in a tuple; None if it is unknown or random."""
        torch, modes = self.torch, importlib.import_module("torch.utils._python_dispatch")
        if any(isinstance(leaf, torch.SymInt) for leaf in self._leaves(args, kwargs)):
            return None
        value_of = lambda leaf: self.values[leaf] if isinstance(leaf, torch.Tensor) else leaf  # noqa: E731
        with modes._disable_current_modes(), torch.no_grad():
            before = torch.get_rng_state()
            try:
                positional, keywords = self.tree.tree_map(value_of, (args, kwargs))
                value = func(*positional, **keywords)
            except Exception:  # The same call in the trace raises the error.
                return None
            if torch.equal(before, torch.get_rng_state()):
                return (value,)
            torch.set_rng_state(before)
        return None

    def _note_all(self, traced: Any, values: Any) -> None:
        torch = self.torch
        for leaf, value in zip(self._leaves(traced), self._leaves(values), strict=False):
            if not isinstance(leaf, torch.Tensor) or not isinstance(value, torch.Tensor):
                continue
            if value.layout == torch.strided:
                self._settle(leaf.shape, value.shape)
                self.values[leaf] = value

    def _settle(self, traced: Any, sizes: Any) -> None:
        """Assert that symbolic sizes of a traced tensor equal the sizes of its value."""
        check = vars(self.torch)["_check"]
        for size, n in zip(traced, sizes, strict=True):
            if isinstance(size, self.torch.SymInt):
                check(size == n)

    def _forget(self, changed: list[Any]) -> None:
        """Drop the values that share memory with modified tensors."""
        places = {self.values[t].untyped_storage().data_ptr() for t in changed if t in self.values}
        for tensor, value in list(self.values.items()):
            if value.untyped_storage().data_ptr() in places:
                del self.values[tensor]


def tracing(values: TracedValues) -> Any:
    """Return a context that records values while torch traces."""
    torch = importlib.import_module("torch")

    class Tracing(torch.overrides.TorchFunctionMode):  # type: ignore[name-defined]
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return values.call(func, args, kwargs or {})

    return Tracing()


def _is_change(func: Callable[..., Any], kwargs: Mapping[str, Any]) -> bool:
    name = getattr(func, "__name__", "")
    is_in_place = name.endswith("_") and not name.endswith("__")
    return is_in_place or name in CHANGES or func is operator.setitem or bool({"out", "inplace"} & set(kwargs))


@contextmanager
def explained() -> Iterator[None]:
    """Raise a `LoweringError` with advice where a trace needs a number that is known only at run time."""
    kind = importlib.import_module("torch.fx.experimental.symbolic_shapes").GuardOnDataDependentSymNode
    try:
        yield
    except kind as error:
        fault = "the model needs a number, or a size, that depends on the values of its arguments"
        advice = "name those arguments in static=, or pass the number, such as size= to global_mean_pool"
        where = next((line for line in str(error).splitlines() if line.startswith("Caused by")), "").strip()
        raise LoweringError(f"{fault}: {advice}{f' ({where})' if where else ''}") from error
    except Exception as error:
        own = _own_cause(error)
        if own is not None:
            raise own from error
        reason = (str(error).strip().splitlines() or [""])[0]
        fault = f"torch.export does not trace the model with these examples ({type(error).__name__}: {reason})"
        raise LoweringError(f"{fault}: see the error above for where") from error


def _own_cause(error: BaseException | None) -> SparseTIRError | None:
    """Return the error of this package that torch replaced by one of its own."""
    while error is not None and not isinstance(error, SparseTIRError):
        error = error.__cause__ or error.__context__
    return error


__all__ = ["Nesting", "TracedValues", "explained", "imported", "tracing"]
