# SPDX-License-Identifier: Apache-2.0
"""How the arguments and results of a torch model nest: tuples, lists, dicts, and values that are no tensors."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from sparsetir.errors import ArgumentError, ArgumentTypeError


@dataclass(frozen=True)
class Nesting:
    """The trees of a model that torch traced.

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
        """The trees of an exported program."""
        signature, dumps = exported.graph_signature, _pytree().treespec_dumps
        inputs = [spec.arg for spec in signature.input_specs if spec.kind.name == "USER_INPUT"]
        outputs = [spec.arg for spec in signature.output_specs if spec.kind.name in ("USER_OUTPUT", "LOSS_OUTPUT")]
        spec = exported.call_spec
        return cls(dumps(spec.in_spec), dumps(spec.out_spec), _constants(inputs), _constants(outputs))

    @cached_property
    def _trees(self) -> tuple[Any, Any]:
        loads = _pytree().treespec_loads
        return loads(self.arguments), loads(self.results)

    @cached_property
    def _is_flat(self) -> bool:
        """Whether all arguments are positional and none holds others: they need not be taken apart."""
        tree = self._trees[0]
        return tree.unflatten(list(range(tree.num_leaves))) == (tuple(range(tree.num_leaves)), {})

    def tensors(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """The tensors among the arguments of a call, in the order of the compiled function.

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
            found = f"{len(args)} positional arguments and {', '.join(kwargs) or 'no'} keywords"
            raise ArgumentTypeError(
                f"expected arguments as in the trace of the model; found {found}: {error}"
            ) from None
        for at, value in self.fixed.items():
            if type(leaves[at]) is not type(value) or leaves[at] != value:
                raise ArgumentError(f"an argument was {value!r} when the model was traced; found {leaves[at]!r}")
        return [leaf for at, leaf in enumerate(leaves) if at not in self.fixed]

    def restored(self, results: Sequence[Any]) -> Any:
        """Results as the model returns them."""
        rest = iter(results)
        tree, constants = self._trees[1], self.constants
        return tree.unflatten([constants[n] if n in constants else next(rest) for n in range(tree.num_leaves)])

    def to_json(self) -> dict[str, Any]:
        """As data."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Nesting:
        """From what `to_json` gave, or from text made of it, in which the positions are words."""
        fixed, constants = ({int(at): value for at, value in data[part].items()} for part in ("fixed", "constants"))
        return cls(data["arguments"], data["results"], fixed, constants)


def _constants(leaves: Sequence[Any]) -> dict[int, Any]:
    return {at: arg.value for at, arg in enumerate(leaves) if type(arg).__name__ == "ConstantArgument"}


def _pytree() -> Any:
    return importlib.import_module("torch.utils._pytree")


__all__ = ["Nesting"]
