# SPDX-License-Identifier: Apache-2.0
"""Arguments of a call, and a program over each format that is tried: converted when needed, dropped to free memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from tvm import tirx

from sparsetir.codegen.cache import Compiled
from sparsetir.codegen.target import make_target
from sparsetir.errors import SparseTIRError, TuningError
from sparsetir.formats.format import Format
from sparsetir.ir.effects import free_sizes
from sparsetir.ir.views import decode
from sparsetir.runtime.composed import ComposedKernel
from sparsetir.runtime.kernel import Kernel
from sparsetir.runtime.signature import Signature, argument_list
from sparsetir.schedules import Choices, Registers, defaults
from sparsetir.transform.decompose import decompose_format
from sparsetir.tuning.features import ArgumentStorage
from sparsetir.tuning.knobs import Config, Template
from sparsetir.tuning.lowered_program import KernelCache, LoweredProgram, form_of
from sparsetir.tuning.space import Values, fixed
from sparsetir.utils.buffers import aligned
from sparsetir.utils.caches import cached_property

MOST_VARIANTS = 16
MOST_BYTES = 2 << 30  # of converted arguments that are kept


@dataclass(frozen=True, eq=False)
class PreparedFormat:
    """A form with its arguments.

    Parameters
    ----------
    form : LoweredProgram
    workload : PreparedCall
    sizes : dict of str to int
        Those that are compiled in.
    stored : ArgumentStorage
        How the format stores the argument.
    usual : Choices
        What a kernel over the format does for these arguments where it is untuned.
    calls : dict
        Of the choices that were compiled.
    """

    form: LoweredProgram
    workload: PreparedCall
    sizes: dict[str, int]
    stored: ArgumentStorage
    usual: Choices
    calls: dict[Choices | Config, Callable[[], Any]] = field(default_factory=dict)

    @cached_property
    def values(self) -> Values:
        """The choices that make a difference."""
        return self.form.open_choices(self.workload.feat)

    def call(self, choices: Choices | Config) -> Callable[[], Any]:
        """Return a call of a candidate's machine code, compiled when it is first asked for."""
        if choices not in self.calls:
            self.calls[choices] = self.workload.call(self.form.compile(choices), self.form.names)
        return self.calls[choices]


class FormatVariants:
    """The variants of a program, by format.

    Parameters
    ----------
    kernel : Kernel
        The untuned one.
    target : Target, str or dict, optional
    inputs : mapping of str to array
    workload : PreparedCall
        Of the program as it is; results of other variants go to its arrays.
    name : str or None
        The sparse argument that is converted.
    template : Template, optional
        Whose knobs are searched. It may refuse the program as it is and fit it over a format.
    """

    def __init__(
        self,
        kernel: Kernel,
        target: Any,
        inputs: Mapping[str, Any],
        workload: PreparedCall,
        name: str | None,
        template: Template | None = None,
    ) -> None:
        self.kernel, self.func, self.target = kernel, kernel.func, target
        self.inputs, self.workload, self.name = dict(inputs), workload, name
        self.template = template
        self.held: dict[Format | None, PreparedFormat] = {}
        self.stored: dict[Format | None, ArgumentStorage] = {}
        self.refused: dict[Format | None, str] = {}

    def __call__(self, format: Format | None) -> PreparedFormat:
        """Return the form over a format.

        Raises
        ------
        TuningError, MemoryError
            It is unavailable.
        """
        if format is not None and format in self.refused:
            raise TuningError(self.refused[format])
        if format not in self.held:
            self._make_room()
            self.held[format] = self._made(format)
        form = self.held.pop(format)
        self.held[format] = form  # moved to the end: the most recently used
        return form

    def values(self, format: Format | None) -> Values | None:
        """Return the open choices of a format; None, and the reason noted, where there is no form."""
        try:
            return self(format).values
        except (SparseTIRError, ValueError, MemoryError, RuntimeError) as error:
            if format is None and self.template is None:
                raise
            self.refused[format] = " ".join(str(error).split())
            return None

    @cached_property
    def shelf(self) -> KernelCache:
        """Where machine code may lie that was made before."""
        return KernelCache(self.func, self.target, self.sizes)

    @cached_property
    def sizes(self) -> dict[str, int]:
        """The sizes that are compiled in, whatever the format: those that no sparse axis of the program depends on."""
        return {name: int(self.workload.args.sizes[name]) for name in free_sizes(decode(self.func))}

    def _make_room(self) -> None:
        """Drop the least recently used variants."""
        others = [format for format in self.held if format is not None]
        while others and (len(others) >= MOST_VARIANTS or sum(self.held[f].stored.bytes for f in others) > MOST_BYTES):
            self.held.pop(others.pop(0))

    def _made(self, format: Format | None) -> PreparedFormat:
        func, workload, stored, kernel = (
            self.func,
            self.workload,
            own_storage(self.workload.signature, self.workload.arrays),
            self.kernel,
        )
        if format is not None:
            func, workload, stored, kernel = self._converted(format)
        decoded = decode(func)
        free = set(free_sizes(decoded))
        sizes = {name: value for name, value in self.sizes.items() if name in free}
        form = form_of(fixed(decoded, sizes), self.target, self.template)
        if self.template is None:
            self.shelf.fill(form, format, workload.feat)
        self.stored[format] = stored
        return PreparedFormat(form, workload, sizes, stored, usual_choices(kernel, workload))

    def _converted(self, format: Format) -> tuple[tirx.PrimFunc, PreparedCall, ArgumentStorage, Kernel]:
        """Return the program over a format, and the arguments in it."""
        parts = decompose_format(self.func, {self.name or "": format})
        composed = ComposedKernel(parts, partial(uncompiled, self.target))
        if not composed.has_plain_results:
            raise TuningError("its results would be stored in pieces")
        start = time.perf_counter()
        arguments, structures = composed.converter.translate(self.inputs)
        seconds = time.perf_counter() - start
        workload = PreparedCall(composed.kernel, composed.needed(arguments), like=self.workload)
        tensors = {id(c): c.tensor for c in structures.values()}.values()
        arrays = [a for n, a in workload.arrays.items() if n not in self.workload.arrays]
        values = sum(piece.packed.count for tensor in tensors for piece in tensor.pieces)
        pieces = sum(len(tensor.pieces) for tensor in tensors)
        rows = int(format.parameters.get("r") or 1)
        stored = ArgumentStorage(values, sum(a.nbytes for a in arrays), pieces, rows, seconds)
        return parts.func, workload, stored, composed.kernel


def uncompiled(target: Any, func: tirx.PrimFunc, covered: Collection[str]) -> Kernel:
    """Return a kernel without machine code, which converts arguments and has no other use."""
    return Kernel(func, Compiled(func, make_target(target, func), None), covered=covered)


def usual_choices(kernel: Kernel, workload: PreparedCall) -> Choices:
    """Return the choices of a kernel for the arguments of a workload if no schedule is requested."""
    return defaults.usual(kernel.func, Registers.of(kernel.target)).changed(**kernel.suitable(workload.args))


def own_storage(signature: Signature, arrays: Mapping[str, np.ndarray]) -> ArgumentStorage:
    """Return the storage of the argument in its own format."""
    sparse = [b for b in signature.buffers.values() if not b.is_dense]
    values = [arrays[n] for b in sparse if (n := str(b.storage.name)) in arrays]
    largest = max(values, key=lambda a: a.size, default=np.zeros(0, np.float32))
    index = sum(a.nbytes for a in arrays.values() if a.dtype.kind in "iu")
    return ArgumentStorage(largest.size, largest.nbytes + index)


# --------------------------------------------------------------------------------- arguments of a call


Function = Callable[..., Any]
Call = Callable[[], Any]


class PreparedCall:
    """The arguments of one call, ready to be passed to any compiled form of a program.

    Arrays that the program writes are copies: the caller's are not touched.

    Parameters
    ----------
    kernel : Kernel
    inputs : dict of str to object
        By name, as for a call.
    like : PreparedCall, optional
        Of the same arguments stored otherwise: its results are written to, and what they held before is its to say.
    """

    def __init__(self, kernel: Kernel, inputs: dict[str, Any], *, like: PreparedCall | None = None) -> None:
        self.signature = kernel.signature
        self.before: dict[str, np.ndarray] = {}
        results = like.written if like is not None else None
        self.args = kernel.prepare({**inputs, **self._new(kernel, results)})
        # The alignment of operands matters more than most choices, and differs between processes.
        arrays, dense = self.args.arrays, {str(b.storage.name) for b in self.signature.buffers.values() if b.is_dense}
        read = (dense & set(arrays)) - set(self.signature.effects.written)
        self.args = replace(self.args, arrays={**arrays, **{name: aligned(arrays[name]) for name in read}})
        if results is None:
            self._take({name: aligned(self.args.arrays[name].copy()) for name in self.signature.effects.written})
        else:
            self._take({name: results[name] for name in self.signature.effects.written})
        if like is not None:  # earlier runs may have changed the arrays
            self.before = {name: like.before[name] for name in self.before}

    @staticmethod
    def _new(kernel: Kernel, results: Mapping[str, np.ndarray] | None) -> dict[str, np.ndarray]:
        """Return those of the given results that the kernel would make."""
        outputs = {kernel.signature.shown(n): n for n in kernel.signature.outputs}
        return {shown: results[n] for shown, n in outputs.items()} if results is not None else {}

    def _take(self, arrays: dict[str, np.ndarray]) -> None:
        """Use other arrays for some of the parameters."""
        self.args = replace(self.args, arrays={**self.args.arrays, **arrays})
        self.before = {name: self.args.arrays[name].copy() for name in self.signature.effects.updated}
        values = argument_list(self.signature, self.args)
        self.ready = {param.name: value for param, value in zip(self.signature.params, values, strict=True)}

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        """The argument of each array parameter."""
        return self.args.arrays

    @property
    def written(self) -> dict[str, np.ndarray]:
        """The arrays that a run writes."""
        return {name: self.arrays[name] for name in self.signature.effects.written}

    @property
    def feat(self) -> int | None:
        """Length of a row of the first output, if it is a dense one of two dimensions or more."""
        for name, array in self.written.items():
            holder = self.signature.holder.get(name)
            is_dense = holder is None or holder.axes[-1].is_dense
            return int(array.shape[-1]) if array.ndim > 1 and is_dense else None
        return None

    def call(self, function: Function, names: list[str]) -> Call:
        """Return one call of a function whose parameters have these names."""
        return partial(function, *(self.ready[name] for name in names))

    def reset(self) -> None:
        """Undo runs: restore updated arrays, poison outputs that are fully written, and zero the others."""
        for name, array in self.written.items():
            if name in self.before:
                array[...] = self.before[name]
            elif name in self.signature.effects.covered:
                array.fill(np.nan if array.dtype.kind in "fcV" else 113)
            else:
                array.fill(0)

    def fresh(self, call: Call) -> dict[str, np.ndarray]:
        """Return the results of one call on reset arrays; the next run overwrites them."""
        self.reset()
        call()
        return self.written

    def absolute(self) -> PreparedCall:
        """Return the workload with the absolute values of all floating-point arrays."""
        other = copy(self)
        written = self.signature.effects.written
        other._take({n: a.copy() for n, a in self.arrays.items() if n in written})
        other._take({n: np.abs(a) for n, a in other.arrays.items() if a.dtype.kind in "fcV"})
        return other


__all__ = ["Call", "FormatVariants", "Function", "PreparedCall", "PreparedFormat", "own_storage", "usual_choices"]
