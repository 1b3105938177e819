# SPDX-License-Identifier: Apache-2.0
"""Round the extent of a dense loop up."""

from __future__ import annotations

from dataclasses import replace

from tvm import tirx

from sparsetir.errors import ScheduleError
from sparsetir.ir import SpIter, cast, const, label
from sparsetir.transform.editing import (
    Edit,
    Editor,
    Ref,
    ceil_div,
    check_count,
    divides,
    rebuilt,
    refuse_grandparent,
    refuse_repeated,
    rehost,
    rehost_nested,
    single_entry,
)
from sparsetir.transform.guard import below, guarded, guarded_init


def pad(func: tirx.PrimFunc, iteration: str, axis: Ref, multiple: int) -> Edit:
    """Iterate a dense axis up to the next multiple of a number, and do nothing beyond its length.

    The loop at stage II then splits by `multiple` without a remainder, so that its tiles are full; the guard is the
    only thing that knows the length. Buffers keep their shapes and nothing beyond them is read or written. A sum
    over the axis stays a single store, as TVM's tiling and tensor primitives want it.
    An axis that hangs from the padded one is attached to it: beyond the length it has no coordinates.

    args:
        iteration: name of a sparse iteration
        axis: a dense_fixed axis of its list; not fused
        multiple: a positive number

    rewrite:
        with T.sp_iter([I, J, F], "SSR", "sddmm") as [i, j, f]:
            C[i, j] = C[i, j] + X[i, f] * Y[j, f]
        ->
        F_pad = T.dense_fixed((feat + 15) // 16 * 16)
        with T.sp_iter([I, J, F_pad], "SSR", "sddmm") as [i, j, f]:
            C[i, j] = C[i, j] + T.if_then_else(f < feat, X[i, f] * Y[j, f], 0)

    Returns
    -------
    str
        The name of the new axis.

    Raises
    ------
    ScheduleError
        The axis is sparse, ragged or fused, or its length is a multiple already.
    """
    multiple = check_count(multiple, "the multiple to pad to")
    editor = Editor(func)
    place = editor.place(iteration)
    found = place.iteration
    entry = single_entry(found, axis, "pad")
    old, var = entry.axes[0], entry.vars[0]
    if old.kind != "dense_fixed":
        raise ScheduleError(f"cannot pad {label(entry)}, which is {old.kind}: only a dense_fixed axis has one length")
    if divides(multiple, old.length):
        raise ScheduleError(f"cannot pad {old.name}: its length {old.length} is a multiple of {multiple} already")
    nested = editor.nested(found)
    refuse_repeated(old, nested, "pad")
    refuse_grandparent(old, [place, *nested], "pad")
    length = ceil_div(cast(old.length, old.idtype), multiple) * const(multiple, old.idtype)
    new = editor.dense(f"{old.name}_pad", length, after=old)
    entries = [replace(e, axes=(new,)) if e is entry else e for e in rehost(found.entries, old, new)]
    inside = below(var, old.length)
    init = guarded_init(inside, found.block.init, [var])
    body = rehost_nested(found.block.body, old, new, editor.program)
    if not _is_covered(found, old):
        body = guarded(inside, body, [var])
    editor.swap(found.node, rebuilt(found, entries, body, init, promise=True))
    return editor.finish(label(replace(entry, axes=(new,))))


def _is_covered(iteration: SpIter, axis: object) -> bool:
    """Whether a loop of the same list has no step beyond the length: one over an axis that hangs from `axis`."""
    return any(e.attached_to is None and e.axes[0].parent is axis for e in iteration.entries)
