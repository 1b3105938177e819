# SPDX-License-Identifier: Apache-2.0
"""A program over each format that is tried, with its arguments converted: made when needed, let go when memory is."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
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
from sparsetir.schedules import Choices, Registers, defaults
from sparsetir.transform.decompose import decompose_format
from sparsetir.tuning.features import Stored
from sparsetir.tuning.kernel_cache import Shelf
from sparsetir.tuning.knobs import Config, Template
from sparsetir.tuning.lowered_program import FormatVariant, form_of
from sparsetir.tuning.space import Values, fixed
from sparsetir.tuning.workload import Workload

MOST_VARIANTS = 16
MOST_BYTES = 2 << 30  # of converted arguments that are held at once


@dataclass(frozen=True, eq=False)
class Ready:
    """A form with its arguments.

    Parameters
    ----------
    form : FormatVariant
    workload : Workload
    sizes : dict of str to int
        Those that are compiled in.
    stored : Stored
        How the format stores the argument.
    usual : Choices
        What a kernel over the format does for these arguments where it is untuned.
    calls : dict
        Of the choices that were compiled.
    """

    form: FormatVariant
    workload: Workload
    sizes: dict[str, int]
    stored: Stored
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
    workload : Workload
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
        workload: Workload,
        name: str | None,
        template: Template | None = None,
    ) -> None:
        self.kernel, self.func, self.target = kernel, kernel.func, target
        self.inputs, self.workload, self.name = dict(inputs), workload, name
        self.template = template
        self.held: dict[Format | None, Ready] = {}
        self.stored: dict[Format | None, Stored] = {}
        self.refused: dict[Format | None, str] = {}

    def __call__(self, format: Format | None) -> Ready:
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
        found = self.held.pop(format)
        self.held[format] = found  # the last one used
        return found

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
    def shelf(self) -> Shelf:
        """Where machine code may lie that was made before."""
        return Shelf(self.func, self.target, self.sizes)

    @cached_property
    def sizes(self) -> dict[str, int]:
        """The sizes that are compiled in, whatever the format: those that no sparse axis of the program depends on."""
        return {name: int(self.workload.args.sizes[name]) for name in free_sizes(decode(self.func))}

    def _make_room(self) -> None:
        """Let variants go that were not used for longest."""
        others = [format for format in self.held if format is not None]
        while others and (len(others) >= MOST_VARIANTS or sum(self.held[f].stored.bytes for f in others) > MOST_BYTES):
            self.held.pop(others.pop(0))

    def _made(self, format: Format | None) -> Ready:
        func, workload, stored, kernel = self.func, self.workload, own_storage(self.workload), self.kernel
        if format is not None:
            func, workload, stored, kernel = self._converted(format)
        decoded = decode(func)
        free = set(free_sizes(decoded))
        sizes = {name: value for name, value in self.sizes.items() if name in free}
        form = form_of(fixed(decoded, sizes), self.target, self.template)
        if self.template is None:
            self.shelf.fill(form, format, workload.feat)
        self.stored[format] = stored
        return Ready(form, workload, sizes, stored, usual_choices(kernel, workload))

    def _not_compiled(self, func: tirx.PrimFunc, covered: Collection[str]) -> Kernel:
        return Kernel(func, Compiled(func, make_target(self.target, func), None), covered=covered)

    def _converted(self, format: Format) -> tuple[tirx.PrimFunc, Workload, Stored, Kernel]:
        """Return the program over a format, and the arguments in it."""
        parts = decompose_format(self.func, {self.name or "": format})
        composed = ComposedKernel(parts, self._not_compiled)
        if not composed.has_plain_results:
            raise TuningError("its results would be stored in pieces")
        start = time.perf_counter()
        given, found = composed.converter.translate(self.inputs)
        seconds = time.perf_counter() - start
        workload = Workload(composed.kernel, composed.needed(given), like=self.workload)
        tensors = {id(c): c.tensor for c in found.values()}.values()
        arrays = [a for n, a in workload.arrays.items() if n not in self.workload.arrays]
        values = sum(piece.packed.count for tensor in tensors for piece in tensor.pieces)
        pieces = sum(len(tensor.pieces) for tensor in tensors)
        rows = int(format.parameters.get("r") or 1)
        stored = Stored(values, sum(a.nbytes for a in arrays), pieces, rows, seconds)
        return parts.func, workload, stored, composed.kernel


def usual_choices(kernel: Kernel, workload: Workload) -> Choices:
    """Return what a kernel does for the arguments of a workload where no schedule is asked for."""
    return defaults.usual(kernel.func, Registers.of(kernel.target)).changed(**kernel.suitable(workload.args))


def own_storage(workload: Workload) -> Stored:
    """Return how the argument is stored as it came."""
    sparse = [b for b in workload.signature.buffers.values() if not b.is_dense]
    arrays = [workload.arrays[n] for b in sparse if (n := str(b.storage.name)) in workload.arrays]
    largest = max(arrays, key=lambda a: a.size, default=np.zeros(0, np.float32))
    index = sum(a.nbytes for a in workload.arrays.values() if a.dtype.kind in "iu")
    return Stored(largest.size, largest.nbytes + index)


__all__ = ["FormatVariants", "Ready", "own_storage", "usual_choices"]
