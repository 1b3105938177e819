# SPDX-License-Identifier: Apache-2.0
"""All default choices: what a kernel gets that nobody tuned, and what a search tries first.

* Loops: `usual`, from a program's results and a target's registers.
* Arguments: `changes` of that, from what a few thousand elements of the arguments are like.

  * Rows of a dense operand that are gathered through an index array are prefetched where they are not in the core's
    cache anyway: a few windows of the array, as many entries long as that cache holds rows, tell how often a row comes
    again.
  * Where many rows of such an operand are gathered for each result, and each is used many times, a panel of its columns
    is packed first, which a cache holds: after fewer uses if the operand as a whole does not fit into the last one.
  * Results that take much of the last cache are written past it.
  * Rows are split among threads where one has clearly more than its share of the work: whole, it would keep one thread
    busy while the others wait.
  * Rows that are summed into one number each are summed in vectors, unless they fit in one and are as long as their
    neighbours; in longer vectors where they are long and the processor mispredicts the loop exit.
  * Dense rows that are summed are kept in registers as a whole if they are shorter than what is usually kept, and half
    by half where the rows that they are multiplied with come from the last cache: that was measured to be faster,
    presumably because the hardware fetches the second halves while the first ones of many rows are read.
  * Little work runs on one core.

* Searches: `PORTFOLIO` for tuning, `sweep` for the coarse sweep of benchmarks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from tvm import tirx
from tvm.runtime import DataType

from sparsetir.ir.rewriting import collect
from sparsetir.ir.usage import (
    Arrays,
    Gather,
    Usage,
    has_longer_row,
    known,
    mean_length,
    share_of_changes,
    share_of_new,
    some_lengths,
)
from sparsetir.schedules.choices import Choices
from sparsetir.schedules.registers import Registers
from sparsetir.utils.machine import LINE, last_cache, private_cache
from sparsetir.utils.threads import get_num_threads

# ------------------------------------------------------------------ constants
# Measured on two cores of an AMD EPYC (Zen 4). `sparsetir bench --data DIR --ops spmm:32,spmm:128,sddmm:128,spmv
# --sweep` prints how far the best choices of a sweep are from those of these rules, for each matrix; with
# `--threads 1` and `2` it shows up to which size one core is faster.

REGISTERS = 8  # of a row's results: enough to hide the latency of the multiply-add units
LEAST_BITS = 32  # of an element in a register

SMALL_ELEMENTS, SMALL_SUMS = 1 << 13, 1 << 16  # of all arrays; where rows are summed into one number each
GATHERED = 4  # elements of such sums that take as long as one that is gathered through an index

TIMES_CACHE = 4.0  # operands up to that many times the cache are left to the hardware
NEW = 0.4  # of the rows in a window
PREFETCH = (8, 32)  # entries ahead, at least and at most
AHEAD = 4096  # bytes of rows between

PANEL = 256  # bytes of a row
OFTEN = 32  # entries of a row, and uses of each gathered row, from which on packing pays if rows come from memory
VERY_OFTEN = 128  # if they come from the last cache, and those of a panel from the core's own
SHARE = 0.25  # of the last cache for a result, and for a panel
MEMORY = 0.5  # of the last cache: larger operands are taken to come from memory

TIMES_SHARE = 1.5  # of a thread's share of the work, from which on a row is split

VARYING = 0.3  # of the rows: their length is another than that of the row before
LANES = 4
LONG = 32  # entries of a row on average, from which on twice the lanes pay where lengths vary

HALF = 4 * LINE  # bytes of a row that is read in two halves
FETCHED_LATE = 2.0  # times the cache: operands up to that are not read in halves
MANY = 16  # entries of a row, from which on its halves are read one after the other
USUAL = 128  # elements of a dense row that are kept in registers
SHORT = 16  # not worth keeping

# What tuning measures before anything is searched, each a change of the choices it begins with.
PORTFOLIO: tuple[dict[str, int], ...] = (
    {},
    {"prefetch": 8},
    {"prefetch": 0},
    {"lanes": 4},
    {"panel": 64, "prefetch": 8},
    {"panel": 0},
    {"tile": 32},
    {"stream": 1, "prefetch": 8},
)
# What a sweep measures of the program as it is, and over formats that did well.
SWEPT: tuple[dict[str, int], ...] = (
    {"prefetch": 8},
    {"prefetch": 16, "unroll": 2},
    {"unroll": 4},
    {"chunks": 0},
    {"stream": 1},
    {"stream": 1, "prefetch": 8},
    {"panel": 64},
    {"panel": 128},
    {"panel": 64, "prefetch": 8},
    {"carry": 1},
    {"lanes": 4},
    {"lanes": 8},
)
SWEPT_OVER_FORMATS: tuple[dict[str, int], ...] = ({"prefetch": 8}, {"panel": 64}, {"stream": 1}, {"unroll": 4})


# ------------------------------------------------------------------ loops


def usual(func: tirx.PrimFunc, registers: Registers) -> Choices:
    """What suits a program's results and a target's registers, whatever the arguments.

    A tile is as long as `REGISTERS` registers, whose elements are as wide as those of the widest result; positions that
    are kept on the way do not count.
    """
    written = {DataType(str(s.buffer.ty.dtype)) for s in collect(func.body, tirx.BufferStore)}
    floats = {dtype for dtype in written if "float" in str(dtype)}
    bits = max((int(dtype.bits) for dtype in floats or written), default=LEAST_BITS)
    return Choices(tile=REGISTERS * registers.bits // max(bits, LEAST_BITS))


# ------------------------------------------------------------------ arguments


def changes(
    usage: Usage, arrays: Arrays, results: Iterable[np.ndarray] = (), *, is_small: bool = False
) -> dict[str, int]:
    """The choices that suit arguments better than the usual ones.

    Parameters
    ----------
    usage : Usage
        Of the program.
    arrays : mapping of str to ndarray
        By the names of parameters.
    results : iterable of ndarray
    is_small : bool
        See `is_small`.
    """
    panel = suitable_panel(usage.gathers, usage.pointers, arrays)
    return {
        **({"panel": panel} if panel else {}),
        **({"prefetch": ahead} if (ahead := suitable_prefetch(usage.gathers, arrays, panel=panel)) else {}),
        **({"stream": 1} if suits_streaming(results) else {}),
        **({"carry": 1} if suits_carry(usage.pointers, arrays, 1 if is_small else get_num_threads()) else {}),
        **({"lanes": lanes} if (lanes := suitable_lanes(usage.sums, arrays)) else {}),
        **({"tile": tile} if (tile := suitable_tile(usage.rows, arrays)) else {}),
        **suitable_halves(usage.gathers, usage.pointers, usage.rows, arrays),
        **({"chunks": 0} if is_small else {}),
    }


def is_small(arrays: Arrays, *, sums_numbers: bool) -> bool:
    """Whether waking a second thread takes longer than the work.

    Parameters
    ----------
    arrays : mapping of str to ndarray
    sums_numbers : bool
        Whether each entry is used for one number, in a sum.
    """
    if not sums_numbers:
        return sum(array.size for array in arrays.values()) <= SMALL_ELEMENTS
    return sum(array.size * (GATHERED if array.dtype.kind in "iu" else 1) for array in arrays.values()) <= SMALL_SUMS


def suitable_prefetch(gathers: Sequence[Gather], arrays: Arrays, *, panel: int = 0) -> int:
    """How many entries ahead to fetch the rows of a gather, or of a panel of it; 0 where the core's own cache has them.

    The shorter the rows, the further: as many bytes are on their way.
    """
    cache = private_cache()
    for indices, operand, rows in known(gathers, arrays):
        row = panel * operand.itemsize or operand.nbytes // rows
        least = cache if panel else TIMES_CACHE * cache
        # Shorter rows are not worth an instruction.
        if row >= LINE and rows * row > least and share_of_new(indices, cache // row) > NEW:
            return min(max(1 << max(AHEAD // row, 1).bit_length() - 1, PREFETCH[0]), PREFETCH[1])
    return 0


def suitable_panel(gathers: Sequence[Gather], pointers: Sequence[str], arrays: Arrays) -> int:
    """Columns of a panel that a cache holds, of an operand whose rows are used so often that packing pays; or 0."""
    length = mean_length(pointers, arrays)
    for indices, operand, rows in known(gathers, arrays):
        uses = min(indices.size / rows, length)
        is_far = operand.nbytes > MEMORY * last_cache()
        pays = uses >= OFTEN if is_far else uses >= VERY_OFTEN and rows * PANEL <= private_cache() <= operand.nbytes
        panel = (PANEL if rows * PANEL <= SHARE * last_cache() else PANEL // 2) // operand.itemsize
        if pays and operand.size // rows >= 2 * panel:
            return panel
    return 0


def suits_streaming(results: Iterable[np.ndarray]) -> bool:
    """Whether some result takes much of the last cache, where it competes with the operands and with other programs."""
    return any(result.ndim > 1 and result.nbytes > SHARE * last_cache() for result in results)


def suits_carry(pointers: Sequence[str], arrays: Arrays, threads: int) -> bool:
    """Whether some row has more work than `TIMES_SHARE` times a thread's share: one step a row and one an entry."""
    if threads < 2:
        return False
    for indptr in (arrays[name] for name in pointers if name in arrays):
        if indptr.size < 2:
            continue
        work = indptr.size - 1 + int(indptr[-1])
        if has_longer_row(indptr, int(TIMES_SHARE * work / threads)):
            return True
    return False


def suitable_lanes(sums: Sequence[str], arrays: Arrays) -> int:
    """How many entries of a ragged row to sum side by side.

    0 where rows fit in one vector and are as long as their neighbours: the processor predicts the loop exit then.
    """
    for name in sums:
        indptr = arrays.get(name)
        if indptr is None or len(indptr) < 2:
            continue
        mean = int(indptr[-1]) / (len(indptr) - 1)
        is_regular = share_of_changes(some_lengths(indptr)) <= VARYING
        if mean >= LONG and not is_regular:
            return 2 * LANES
        return LANES if mean > LANES or not is_regular else 0
    return 0


def suitable_tile(rows: Sequence[tuple[str, int]], arrays: Arrays) -> int:
    """How much of dense rows that are summed to keep in registers where that is less than usual; else 0."""
    for name, dimension in rows:
        array = arrays.get(name)
        if array is not None and array.ndim > dimension and SHORT <= array.shape[dimension] < USUAL:
            return 1 << (array.shape[dimension].bit_length() - 1)
    return 0


def suitable_halves(
    gathers: Sequence[Gather], pointers: Sequence[str], rows: Sequence[tuple[str, int]], arrays: Arrays
) -> dict[str, int]:
    """The tile and the distance of fetching for dots with gathered rows of two halves, where reading them so pays.

    Not where they come from memory, whose rows are best read in one go, or from the core's own cache; nor where other
    rows are gathered too, as in attention: it would be their tile as well, and no gain is left of it.
    """
    cache, row = private_cache(), 2 * HALF
    held = ((name, arrays[name], d) for name, d in rows if name in arrays)
    summed = {name for name, array, d in held if array.ndim > d and array.shape[d] * array.itemsize == row}
    if mean_length(pointers, arrays) < MANY or not all(gather.operand in summed for gather in gathers):
        return {}
    for indices, operand, count in known(gathers, arrays):
        is_far = FETCHED_LATE * cache < operand.nbytes <= MEMORY * last_cache()
        if is_far and operand.nbytes == count * row and share_of_new(indices, cache // row) > NEW:
            return {"tile": HALF // operand.itemsize, "prefetch": AHEAD // HALF}
    return {}


# ------------------------------------------------------------------ searches


def sweep(base: Choices, *, over_format: bool = False) -> list[Choices]:
    """The choices that a coarse sweep tries besides `base`."""
    wide, narrow = {"tile": 2 * base.tile}, {"tile": max(base.tile // 2, 8)}
    tiles = [wide, narrow] if over_format else [wide, narrow, {**wide, "prefetch": 8}, {**narrow, "prefetch": 8}]
    return [base.changed(**changed) for changed in (*(SWEPT_OVER_FORMATS if over_format else SWEPT), *tiles)]


__all__ = [
    "PORTFOLIO",
    "changes",
    "is_small",
    "suitable_halves",
    "suitable_lanes",
    "suitable_panel",
    "suitable_prefetch",
    "suitable_tile",
    "suits_carry",
    "suits_streaming",
    "sweep",
    "usual",
]
