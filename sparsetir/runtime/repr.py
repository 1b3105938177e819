# SPDX-License-Identifier: Apache-2.0
"""How kernels show themselves: in the words of the user's script."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from sparsetir.ir.views import Program, SparseBuffer

if TYPE_CHECKING:
    from sparsetir.runtime.signature import Signature


#: The kinds of a buffer's axes, but for dense axes that stand alone, and what the layout is called.
LAYOUTS = {
    ("dense_fixed", "sparse_variable"): "csr",
    ("sparse_fixed", "singleton"): "coo",
    ("sparse_variable", "sparse_variable"): "dcsr",
    ("dense_fixed", "sparse_fixed"): "ell",
    ("dense_fixed", "dense_variable"): "ragged",
    ("dense_fixed", "sparse_variable", "sparse_variable"): "csf",
}


def layout_of(buffer: SparseBuffer) -> str:
    """Return the usual name of the way a buffer is stored; empty for a dense one.

    Examples
    --------
    >>> import sparsetir
    >>> [layout_of(sparsetir.ir.decode(sparsetir.ops.spmm(format=f)).buffer("A")) for f in ("csr", "csc", "bsr", "coo")]
    ['csr', 'csc', 'bsr', 'coo']
    """
    if buffer.is_dense:
        return ""
    sparse = [tree for tree in buffer.trees if len(tree) > 1 or tree[0].kind != "dense_fixed"]
    kinds = tuple(axis.kind.replace("sparse_assembled", "sparse_variable") for axis in sparse[0])
    name = LAYOUTS.get(kinds, "sparse") if len(sparse) == 1 else "sparse"
    if name == "csr" and len(buffer.trees) == 3:
        return "bsr"
    in_order = [buffer.axes.index(axis) for axis in sparse[0]]
    return "csc" if name == "csr" and in_order == [1, 0] else name


def shown_buffer(buffer: SparseBuffer, *, layout: bool = True) -> str:
    """Name, dtype, sizes and layout of a buffer, as in ``A: float32[m, n] csr``."""
    sizes = ", ".join(str(axis.length) for axis in buffer.axes)
    layout_text = layout_of(buffer) if layout else ""
    return f"{buffer.name}: {buffer.dtype}[{sizes}] {layout_text}".rstrip()


def shown_signature(signature: Signature, converted: Collection[str] = (), declared: Program | None = None) -> str:
    """Return the arguments and results of a kernel.

    Index arrays of buffers that are passed whole are left out.

    Parameters
    ----------
    signature : Signature
    converted : collection of str
        Buffers whose class is free: they are shown without their layout.
    declared : Program, optional
        The program as it was written, where the signature is of one with stand-ins for results.
    """
    written: dict[str, SparseBuffer] = {} if declared is None else {b.name: b for b in declared.buffers.values()}
    holders = [signature.holder[p.name] for p in signature.params if p.name in signature.holder]
    outputs = [signature.holder[name] for name in signature.results]

    def show(buffer: SparseBuffer) -> str:
        return shown_buffer(written.get(buffer.name, buffer), layout=buffer.name not in converted)

    inputs = [show(b) for b in holders if b not in outputs]
    inputs += [p.name for p in signature.params if p.is_array and p.name not in _passed_whole(signature)]
    return f"({', '.join(inputs)}) -> {', '.join(map(show, outputs)) or 'updates in place'}"


def _passed_whole(signature: Signature) -> set[str]:
    """Return the array parameters that a caller need not name: those of buffers, and of the axes of buffers."""
    axes = [axis for buffer in signature.buffers.values() for axis in buffer.axes]
    arrays = [array for axis in axes for array in (axis.indptr, axis.indices) if array is not None]
    return {*signature.holder, *(str(array.name) for array in arrays)}


__all__ = ["layout_of", "shown_buffer", "shown_signature"]
