# SPDX-License-Identifier: Apache-2.0
"""A kernel over other formats, called like the original: sparse arguments are converted when first seen."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import scipy.sparse as sp
from tvm import tirx

from sparsetir.codegen.cache import Compiled
from sparsetir.codegen.export import Interface, export
from sparsetir.errors import ArgumentError
from sparsetir.formats.format import Format
from sparsetir.formats.tensor import SparseTensor
from sparsetir.interop.sources import holds_own_values, open_source
from sparsetir.ir.views import decode
from sparsetir.runtime.bound import BoundComposedKernel
from sparsetir.runtime.call_plan import CallTiming
from sparsetir.runtime.conversion import Converted, Converter, check_axes, structure_of
from sparsetir.runtime.kernel import Kernel
from sparsetir.runtime.serialization import Saved, layout, write_pieces
from sparsetir.runtime.signature import Signature, SizeOf, check_writable, shown_signature
from sparsetir.transform.decompose import Decomposition
from sparsetir.utils.arguments import as_path, shown

Compile: TypeAlias = Callable[[tirx.PrimFunc, Collection[str]], Kernel]


class ComposedKernel(Saved):
    """A compiled decomposition, called by the buffer names of the original program.

    Parameters
    ----------
    decomposition : Decomposition
        The program over the pieces, and how its parameters come from those of the original.
    compile : callable, optional
        Makes a `Kernel` of a program, told which results are written everywhere; without it arguments can be converted
        only.

    Examples
    --------
    >>> import numpy as np, scipy.sparse as sp, sparsetir
    >>> from sparsetir import formats
    >>> parts = sparsetir.decompose_format(sparsetir.ops.spmm(), {"A": formats.bsr(2, 2)})
    >>> kernel = sparsetir.build(parts)
    >>> A = sp.random_array((4, 3), density=0.5, format="csr", dtype="float32", random_state=0)
    >>> B = np.ones((3, 2), "float32")
    >>> bool(np.allclose(kernel(A=A, B=B), A @ B))
    True
    """

    kernel: Kernel

    def __init__(self, decomposition: Decomposition, compile: Compile | None = None) -> None:
        self.decomposition = decomposition
        self.signature = Signature(decode(decomposition.original), set())
        self.names: set[str] = set()  # of arguments that are passed on as they are
        if compile is not None:
            check_axes(decomposition, self.signature)
            # The pieces together set what the original sets: with the sizes from conversion, every element.
            self.kernel = compile(decomposition.func, self.signature.effects.covered)
            inner, outer = self.kernel.signature, self.signature
            inner.caller_names = self._caller_names()
            self.names = (inner.by_name.keys() | inner.buffers.keys()) & (outer.by_name.keys() | outer.buffers.keys())
        self.converter = Converter(decomposition, self.signature, self.names)

    def _caller_names(self) -> dict[str, str]:
        """Return the name of the argument that each array of a piece comes from."""
        names: dict[str, str] = {}
        for group in self.decomposition.groups:
            for piece in group.pieces:
                names |= dict.fromkeys((*piece.params.values(), *filter(None, [piece.mask])), group.name)
                names |= {array: self.signature.shown(storage) for storage, array in piece.values.items()}
        return names

    @property
    def name(self) -> str:
        return str(self.decomposition.func.attrs["global_symbol"])

    @property
    def func(self) -> tirx.PrimFunc:
        """The stage-I program over the pieces."""
        return self.decomposition.func

    @property
    def target(self) -> Any:
        """The TVM target it is compiled for."""
        return self.kernel.target

    @property
    def formats(self) -> dict[str, Format]:
        """The format of each decomposed buffer."""
        return dict(self.decomposition.formats)

    def __repr__(self) -> str:
        formats_text = ", ".join(f"{name} as {format!r}" for name, format in self.formats.items())
        return f"Kernel {self.name}{shown_signature(self.signature, self.formats)} with {formats_text}"

    # ------------------------------------------------------------------ calling

    def __call__(self, *unnamed: Any, **arguments: Any) -> Any:
        """Run the kernel; see `Kernel.__call__`. A sparse argument is converted when its structure is new."""
        if unnamed:
            raise self.signature.unnamed(unnamed)
        self.check_results(arguments)
        translated, converted = self.converter.translate_complete(arguments)
        translated = self.needed(translated)
        outputs = self.new_outputs(converted, translated)
        out = self.kernel(**translated, **outputs)
        return self.results(out, converted, {**translated, **outputs}, arguments)

    def needed(self, translated: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments without those sizes of the original that the compiled program has no use for."""
        params = self.kernel.signature.by_name
        return {n: v for n, v in translated.items() if n in params or not isinstance(v, SizeOf)}

    def bind(self, **arguments: Any) -> BoundComposedKernel:
        """Fix some arguments: sparse ones are converted once, their values too."""
        return BoundComposedKernel(self, arguments)

    def time(self, *, seconds: float = 0.2, **arguments: Any) -> CallTiming:
        """Time repeated calls of the compiled function itself, arguments converted and ready."""
        translated, converted = self.converter.translate_complete(arguments)
        return self.kernel.time(seconds=seconds, **self.needed(translated), **self.new_outputs(converted, translated))

    def script(self, stage: int = 1, *, outline: bool = False, **sizes: int) -> str:
        """Return the program over the pieces at a stage; see `Kernel.script`."""
        return self.kernel.script(stage, outline=outline, **sizes)

    def source(self, kind: str = "ll") -> str:
        """Its LLVM IR or assembly; see `Kernel.source`."""
        return self.kernel.source(kind)

    def export(self, path: str | Path, *, header: str | Path | None = None) -> Path:
        """Write a shared library and a C header; see `Kernel.export`.

        The C function takes the arrays and sizes of the pieces in place of the sparse arguments. The header says how
        they are laid out; `write_pieces` writes those of an argument.
        """
        where = Path(header) if header is not None else None
        return export(self.kernel, Path(path), where, interface=Interface(self.kernel, layout(self.decomposition)))

    def write_pieces(self, folder: str | Path, **arguments: Any) -> Path:
        """Write sparse arguments as the exported C function takes them.

        Parameters
        ----------
        folder : str or Path
            Made if it is not there. Each array goes to a file of its own, ``indices_bsr.bin``: elements in order, as
            they lie in memory.
        **arguments
            Sparse arguments by name.

        Returns
        -------
        Path
            A C header with the sizes, ``PIECES_mb_bsr``, and the numbers of elements, ``PIECES_indices_bsr_COUNT``.
        """
        return write_pieces(self, as_path(folder, "folder", "the path of a folder"), arguments)

    def compiled_parts(self) -> Iterator[Compiled]:
        if hasattr(self, "kernel"):
            yield from self.kernel.compiled_parts()

    def __reduce__(self) -> tuple[Any, ...]:
        return _recomposed, (self.decomposition, getattr(self, "kernel", None))

    def convert(self, name: str, value: Any) -> SparseTensor:
        """Return a sparse argument in the format that the kernel has for it."""
        groups = self.converter.groups
        if not isinstance(name, str) or name not in groups:
            raise ArgumentError(f"name: expected one of {', '.join(groups)}, got {shown(name)}. Pass one of these.")
        return self.converter.converted(groups[name], name, value, open_source(value, name)).tensor

    def pieces(self, **arguments: Any) -> dict[str, Any]:
        """Sparse arguments as arrays and sizes by the names of the compiled function's parameters."""
        return self.converter.translate(arguments)[0]

    # ------------------------------------------------------------------ results

    @property
    def has_plain_results(self) -> bool:
        """Whether no result is stored in pieces."""
        written = [*self.signature.outputs, *self.signature.effects.updated]
        return all(self.converter.group_of(name) is None for name in written)

    def check_results(self, arguments: Mapping[str, Any]) -> None:
        """Raise where a result that is stored in pieces cannot be written to the object that was passed for it."""
        for name in (*self.signature.outputs, *self.signature.effects.updated):
            shown_name = self.signature.shown(name)
            target = arguments.get(shown_name)
            if self.converter.group_of(name) is not None and isinstance(target, (sp.sparray, sp.spmatrix)):
                has_own = holds_own_values(target)
                values = target.data if has_own else np.empty(0)
                check_writable(values, shown_name, type(target), copied=not has_own)

    def new_outputs(self, converted: Mapping[str, Converted], given: Mapping[str, Any]) -> dict[str, Any]:
        """Return new arrays for the results that are stored in pieces."""
        outputs: dict[str, Any] = {}
        for name in self.signature.outputs:
            group = self.converter.group_of(name)
            if group is None:
                continue
            structure = structure_of(group, converted)
            assert structure is not None  # a complete call has one
            dtype = self.signature.by_name[name].dtype
            zeros = [np.zeros(piece.packed.count, dtype) for piece in structure.tensor.pieces]
            zeros_of = structure.values(group, name, zeros)
            outputs.update({n: a for n, a in zeros_of.items() if n not in given})
        return outputs

    def results(
        self, out: Any, converted: Mapping[str, Converted], given: Mapping[str, Any], arguments: Mapping[str, Any]
    ) -> Any:
        """Return the results of the compiled function, whose arguments were `given`, in the caller's terms."""
        inner = self.kernel.signature
        names = inner.outputs or inner.effects.updated
        results = dict(zip(names, out if len(names) > 1 else (out,), strict=True))
        effects = self.signature.effects
        also = [n for n in effects.updated if self.converter.group_of(n) is not None]
        results_of = {
            n: self._result(n, results, converted, given, arguments) for n in [*self.signature.outputs, *also]
        }
        wanted = tuple(
            results_of[n] if n in results_of else results[n] for n in self.signature.outputs or effects.updated
        )
        return wanted[0] if len(wanted) == 1 else wanted

    def _result(
        self,
        name: str,
        results: Mapping[str, Any],
        converted: Mapping[str, Converted],
        given: Mapping[str, Any],
        arguments: Mapping[str, Any],
    ) -> Any:
        """One result in the caller's terms."""
        group = self.converter.group_of(name)
        if group is None:
            return results[name]
        buffer_name = self.signature.shown(name)
        structure = converted.get(buffer_name) or structure_of(group, converted)
        assert structure is not None  # a complete call has one
        out = structure.restore([given[piece.values[name]] for piece in group.pieces])
        output_of_caller = arguments.get(buffer_name)
        return out if output_of_caller is None else _written(output_of_caller, out)


def _written(target: Any, out: Any) -> Any:
    """Return the caller's own object with the values of a result."""
    if not sp.issparse(target) or target.data.shape != out.data.shape:
        raise ArgumentError(f"a {type(target).__name__} cannot be written in place: leave it out and take the result")
    target.data[...] = out.data
    return target


def _recomposed(decomposition: Decomposition, kernel: Kernel | None) -> ComposedKernel:
    """Return a composed kernel from its pickled state."""
    return ComposedKernel(decomposition, None if kernel is None else lambda _func, _covered: kernel)


__all__ = ["ComposedKernel"]
