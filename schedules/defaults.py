# SPDX-License-Identifier: Apache-2.0
"""Default choices: those of untuned kernels, and the first candidates of a search.

* Loops: `usual`, from a program's results and a target's registers.
* Arguments: `changes` to these choices, from a sample of a few thousand elements of the arguments.

  * Rows of a dense operand that are gathered through an index array are prefetched unless they are in the core's
    private cache. The rate at which rows repeat is estimated from a few windows of the index array, each as many
    entries long as that cache has room for rows.
  * Where many rows of such an operand are gathered for each result, and each is used many times, a panel of its columns
    that fits in a cache is packed first; fewer uses suffice if the operand does not fit into the last-level cache, if
    its rows are read in several pieces, which lie so far apart that few sets of the caches hold them, or where the
    machine's profile says that the level behind the private cache is slow.
  * Results that take a large share of the last-level cache are written with non-temporal stores.
  * A row is split among threads if it has clearly more than a thread's share of the work: one thread would compute the
    whole row while the others wait.
  * Rows that are summed into one number each are left to LLVM where it may take their terms in another order: it sums
    long rows in several wide vectors, and the last entries of each row one by one. They are summed in vectors with a
    masked remainder where vector gathers are fast and such entries are many; elsewhere, in few lanes, where they are
    short, many, and of varying lengths, so that the processor mispredicts the loop exit, and where they are long. The
    shortest of them are staged: the terms of a block of rows are computed before it is summed. Where LLVM
    must keep the order, all but short rows of one length are summed in vectors.
  * The length of dense rows is compiled in where it is at most `NARROW`: loops over whole vectors need no rest then.
  * Dense rows that are summed are kept in registers as a whole if they are shorter than the default tile. They are kept
    half by half where the rows that they are multiplied with come from the last-level cache: that was measured to be
    faster, presumably because the hardware prefetches the second halves while the first ones of many rows are read.
  * Work that one core does in less time than waking the others saves is left to it.

* Searches: `PORTFOLIO` for tuning, `sweep` for the coarse sweep of benchmarks.

Predicted seconds are those of the gathered rows, of beginnings and ends of rows, and of the results. Rows of a dense
operand that are read through an index array come from the largest effective level within the private cache if they were
read a short time ago, and from where the whole operand lies otherwise. In a panel the operand is narrower, but it is
copied once, the index array is read once for each panel, and rows of results are computed in more pieces. Arithmetic is
the same for all choices and is left out, but for the latency of a sum.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

import numpy as np
from tvm import tirx
from tvm.runtime import DataType

from sparsetir.ir.effects import (
    Arrays,
    Gather,
    Usage,
    has_longer_row,
    known,
    mean_length,
    share_of_changes,
    share_of_misses,
    share_of_new,
    some_lengths,
)
from sparsetir.ir.rewriting import collect
from sparsetir.schedules.choices import Choices
from sparsetir.schedules.registers import OwnSums, Registers
from sparsetir.utils.machine import LINE, ROW_ENTRIES, MachineProfile, last_cache, private_cache
from sparsetir.utils.threads import get_num_threads


def predicted_seconds(
    usage: Usage,
    arrays: Arrays,
    results: Iterable[np.ndarray],
    profile: MachineProfile,
    *,
    panel: int = 0,
    prefetch: int = 0,
) -> float:
    """Return the seconds that one core takes for the gathered rows and the results of a program.

    Parameters
    ----------
    usage : Usage
    arrays : mapping of str to ndarray
        Arguments by parameter name.
    results : iterable of ndarray
    profile : MachineProfile
    panel : int
        Columns of a packed panel; 0 leaves operands as they are.
    prefetch : int
        Distance in entries.
    """
    near, row_seconds = near_bytes(profile), ROW_LATENCIES * profile.fma_latency
    seconds = 0.0
    for indices, operand, rows in known(usage.gathers, arrays):
        row = operand.nbytes // max(rows, 1)
        read = min(panel * operand.itemsize, row) if panel else row
        gathered = gathered_seconds(indices, rows, read, profile, near, prefetch)
        # Without the share of a row's beginning and end that the profile counts to each of its entries.
        inner = gathered - indices.size * row_seconds / ROW_ENTRIES
        seconds += row / max(read, 1) * max(inner, min(gathered, indices.size * profile.fma_latency))
        seconds += 2 * operand.nbytes / profile.store if panel else 0.0
    for result in results:
        if result.ndim > 1 and result.size:
            columns = result.shape[-1]
            seconds += result.size / columns * -(-columns // (panel or USUAL)) * row_seconds
        if panel and result.nbytes:
            piece = panel * result.itemsize
            # A piece of a row is read into the caches before it is written.
            seconds += 2 * result.nbytes / piece * profile.gather_seconds(piece, result.nbytes)
        elif result.nbytes > near:
            seconds += result.nbytes / profile.store
    return seconds


def gathered_seconds(
    indices: np.ndarray, rows: int, row_bytes: int, profile: MachineProfile, near: int, prefetch: int = 0
) -> float:
    """Return the seconds to read a row for each entry of an index array once."""
    working_set = rows * row_bytes
    far = profile.gather_seconds(row_bytes, working_set, prefetch)
    if working_set <= near or not indices.size:
        return indices.size * far
    new = share_of_misses(indices, max(near // max(row_bytes, 1), 1))
    return indices.size * (new * far + (1 - new) * profile.gather_seconds(row_bytes, near, prefetch))


def near_bytes(profile: MachineProfile) -> int:
    """Return the largest effective level of a profile within the core's private cache."""
    private = private_cache()
    return max((level.size for level in profile.levels if 0 < level.size <= private), default=private)


# ------------------------------------------------------------------ constants
# Measured on two cores of an AMD EPYC (Zen 4). `sparsetir bench --data DIR --ops spmm:32,spmm:128,sddmm:128,spmv
# --sweep` prints how far the best choices of a sweep are from those of these rules, for each matrix; with
# `--threads 1` and `2` it shows up to which size one core is faster.

REGISTERS = 8  # registers for a row's results: enough to hide the latency of the multiply-add units
LEAST_BITS = 32  # minimum bits of an element in a register

TIMES_CACHE = 4.0  # operands up to this multiple of the private cache are left to the hardware prefetcher
NEW = 0.4  # share of the rows in a window that do not repeat, above which prefetching pays
PREFETCH = (8, 32)  # minimum and maximum prefetch distance in entries
AHEAD = 4096  # prefetch distance in bytes of rows

PANEL = 256  # bytes of a row of a panel
OFTEN = 32  # entries of a row and uses of each gathered row above which packing pays for far or scattered rows
VERY_OFTEN = 128  # the same if rows come from the last-level cache and those of a panel from the private one
SHARE = 0.25  # share of the last-level cache: limit for a panel, and for a result that is not streamed
PANELS = (128, 256, 512)  # bytes of a row of the panels whose time is estimated
WORTH = 1.1  # times as fast as the operand as it is that a panel must be predicted to be
ROW_LATENCIES = 20  # latencies of a multiply-add that a row takes beside its entries: its exit is mispredicted
MEMORY = 0.5  # share of the last-level cache: larger operands are assumed to come from memory

TIMES_SHARE = 1.5  # multiple of a thread's share of the work above which a row is split

VARYING = 0.3  # share of rows whose length differs from the row before, above which lengths are irregular
LANES = 4
FEW_CHECKED = 1 << 14  # entries
SHORT_CHECKED, LONG_CHECKED = 12, 32  # entries of a row: between them neither way through a row is the quick one
LONG = 32  # mean entries of a row from which on twice the lanes pay where lengths vary
LEARNT = 2000  # rows whose lengths the processor learns when a kernel is called again and again
NEAR = 0.5  # share of the private cache up to which the operand of sums in lanes is near
STAGED_ROWS = 64
STAGED_MEAN = 10  # mean entries of rows of varying lengths up to which terms are staged
STAGED_LANES = (8, 16)  # of which the first are taken where most rows have no more entries
# Where instructions gather vectors: the lanes of a sum, and the mean entries of a row beyond whole vectors from which
# on a masked vector is faster than LLVM's loop over them one by one.
GATHERED_LANES, LEAST_REST = 8, 3.0
# Mean entries of a row from which on lanes pay where LLVM gathers numbers one by one, of near operands and of others.
GATHERED_NEAR, GATHERED_LONG = 16, 64

# Cache lines that the vectors of a gathered row read, as a multiple of those of an aligned row, from which on calls
# with a copy are timed. The first is for vectors that are a line, of which each that lies in two takes twice as long.
COPIED_VECTORS, COPIED_LINES = 1.12, 1.15
COPIED_ROW = 1 << 10  # bytes of the longest row that is copied
COPIED_LONG = 1 << 22  # bytes of operands with rows of more than two lines: a copy takes memory as well
BEGINS = 16  # bytes after a cache line at which most of numpy's arrays begin
COPIED_READS = 4  # of a row for each copy of it: a copy reads and writes the lines of which each read saves one
COPIED_FROM = 1 << 20  # gathered bytes, which take longer than to look at the address
COPIED_BYTES = 1 << 28
HALF = 4 * LINE  # bytes of each half of a row that is read in two halves
FETCHED_LATE = 2.0  # multiple of the private cache up to which operands are not read in halves
MANY = 16  # mean entries of a row from which on halves of rows pay
USUAL = 128  # elements of a dense row that are kept in registers by default
SHORT = 16  # shorter rows are not worth keeping
NARROW = 64  # elements of the longest dense rows whose length is compiled in

# Candidates that tuning measures before any search, each a change to the choices it begins with.
PORTFOLIO: tuple[dict[str, int], ...] = (
    {},
    {"prefetch": 8},
    {"prefetch": 0},
    {"lanes": 4},
    {"lanes": 8, "staged": 64},
    {"lanes": 16, "staged": 64},
    {"panel": 64, "prefetch": 8},
    {"panel": 0},
    {"tile": 32},
    {"stream": 1, "prefetch": 8},
)
# Candidates of a sweep for the program as it is; below, those for the formats that did well.
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
    {"lanes": 8, "staged": 64},
    {"lanes": 16, "staged": 64},
)
SWEPT_OVER_FORMATS: tuple[dict[str, int], ...] = ({"prefetch": 8}, {"panel": 64}, {"stream": 1}, {"unroll": 4})


# ------------------------------------------------------------------ loops


def usual(func: tirx.PrimFunc, registers: Registers) -> Choices:
    """Return the default choices for a program's results and a target's registers, independent of the arguments.

    A tile is as long as `REGISTERS` registers of elements of the widest result's dtype. Stored integers, such as
    positions, do not count if there are floats.
    """
    written = {DataType(str(s.buffer.ty.dtype)) for s in collect(func.body, tirx.BufferStore)}
    floats = {dtype for dtype in written if "float" in str(dtype)}
    bits = max((int(dtype.bits) for dtype in floats or written), default=LEAST_BITS)
    return Choices(tile=REGISTERS * registers.bits // max(bits, LEAST_BITS))


# ------------------------------------------------------------------ arguments


def changes(
    usage: Usage,
    arrays: Arrays,
    results: Iterable[np.ndarray] = (),
    *,
    is_small: bool = False,
    profile: Callable[[], MachineProfile] | None = None,
    own_sums: OwnSums | None = None,
    tile: int = 0,
) -> dict[str, int]:
    """Return the choices that suit the arguments better than the default ones.

    Parameters
    ----------
    usage : Usage
        How the program uses its arrays.
    arrays : mapping of str to ndarray
        Arguments by parameter name.
    results : iterable of ndarray
    is_small : bool
        Whether the work is too small for a second thread (`defaults.is_small`).
    profile : callable, optional
        Returns the rates of the machine that runs the program. Without it the sizes of the caches decide about panels.
    own_sums : OwnSums, optional
        The vectors that LLVM sums rows in by itself; without it it keeps the order of their terms.
    tile : int
        Elements of a row that are kept in registers by default; 0 for all of them.
    """
    results = list(results)
    panel = suitable_panel(usage.gathers, usage.pointers, arrays, tile)
    if not panel and profile is not None:
        panel = estimated_panel(usage, arrays, results, profile)
    return {
        **({"panel": panel} if panel else {}),
        **({"prefetch": ahead} if (ahead := suitable_prefetch(usage.gathers, arrays, panel=panel)) else {}),
        **({"stream": 1} if suits_streaming(results) else {}),
        **({"carry": 1} if suits_carry(usage.pointers, arrays, 1 if is_small else get_num_threads()) else {}),
        **suitable_sums(usage, arrays, own_sums),
        **({"tile": tile} if (tile := suitable_tile(usage.rows, arrays)) else {}),
        **suitable_halves(usage.gathers, usage.pointers, usage.rows, arrays),
        **({"chunks": 0} if is_small else {}),
    }


def is_small(usage: Usage, arrays: Arrays, profile: MachineProfile, *, steps: float, sums_numbers: bool) -> bool:
    """Return whether the work is too small for a second thread: waking it would take longer than it saves.

    Parameters
    ----------
    usage : Usage
    arrays : mapping of str to ndarray
        Arguments by parameter name.
    profile : MachineProfile
    steps : float
        How often the bodies of all iterations run.
    sums_numbers : bool
        Whether each entry contributes to one number only, in a sum.
    """
    reading = summing_seconds(arrays, profile) if sums_numbers else reading_seconds(usage, arrays, profile)
    computing = steps * (2 / max(profile.fma.values()) + usage.functions * profile.fma_latency)
    return max(reading, computing) * (1 - 1 / max(get_num_threads(), 2)) <= profile.wake


def summing_seconds(arrays: Arrays, profile: MachineProfile) -> float:
    """Return the seconds that one core takes to sum products of entries and numbers: small arrays, in its caches."""
    gathered = sum(array.size for array in arrays.values() if array.dtype.kind in "iu")
    read = sum(array.nbytes for array in arrays.values())
    return gathered * min(profile.scalar_load, profile.vector_gather) + profile.read_seconds(read, near_bytes(profile))


def reading_seconds(usage: Usage, arrays: Arrays, profile: MachineProfile) -> float:
    """Return the seconds that one core takes to read each entry's row, and all arrays number by number."""
    near = near_bytes(profile)
    rows = sum(
        indices.size * profile.gather_seconds(operand.nbytes // rows, min(operand.nbytes, near))
        for indices, operand, rows in known(usage.gathers, arrays)
    )
    return rows + sum(array.size for array in arrays.values()) * profile.scalar_load


def suitable_prefetch(gathers: Sequence[Gather], arrays: Arrays, *, panel: int = 0) -> int:
    """Return the prefetch distance, in entries, for the rows of a gather or of its panel; 0 if they are in cache.

    Shorter rows are prefetched further ahead, so that the same number of bytes is in flight.
    """
    cache = private_cache()
    for indices, operand, rows in known(gathers, arrays):
        row = panel * operand.itemsize or operand.nbytes // rows
        least = cache if panel else TIMES_CACHE * cache
        # Rows shorter than a cache line are not worth a prefetch instruction.
        if row >= LINE and rows * row > least and share_of_new(indices, cache // row) > NEW:
            return min(max(1 << max(AHEAD // row, 1).bit_length() - 1, PREFETCH[0]), PREFETCH[1])
    return 0


def suitable_panel(gathers: Sequence[Gather], pointers: Sequence[str], arrays: Arrays, tile: int = 0) -> int:
    """Return the columns of a panel that fits in a cache if an operand is used so often that packing pays; else 0.

    `tile` are the elements of a row that are read at a time, 0 for all of them.
    """
    length = mean_length(pointers, arrays)
    for indices, operand, rows in known(gathers, arrays):
        uses = min(indices.size / rows, length)
        is_far = operand.nbytes > MEMORY * last_cache()
        is_scattered = 0 < 2 * tile <= operand.size // rows
        pays = (
            uses >= OFTEN
            if is_far or is_scattered
            else uses >= VERY_OFTEN and rows * PANEL <= private_cache() <= operand.nbytes
        )
        panel = (PANEL if rows * PANEL <= SHARE * last_cache() else PANEL // 2) // operand.itemsize
        if pays and operand.size // rows >= 2 * panel:
            return panel
    return 0


def estimated_panel(
    usage: Usage, arrays: Arrays, results: Sequence[np.ndarray], profile: Callable[[], MachineProfile]
) -> int:
    """Return the columns of the panel that is predicted to take the least time; 0 where none is worth it.

    A private cache may be so much faster than the level behind it that panels pay for operands that the last-level
    cache would hold.
    """
    operands = [(operand, operand.nbytes // rows) for _, operand, rows in known(usage.gathers, arrays)]
    wide = [(operand, row) for operand, row in operands if row >= 2 * PANELS[0]]
    if not wide or max(operand.nbytes for operand, _ in wide) <= private_cache() // 2:
        return 0
    machine, itemsize = profile(), max(operand.itemsize for operand, _ in wide)
    width = max(row for _, row in wide)
    panels = [size // itemsize for size in PANELS if width >= 2 * size]
    ahead = {panel: suitable_prefetch(usage.gathers, arrays, panel=panel) for panel in (0, *panels)}
    seconds = {
        panel: predicted_seconds(usage, arrays, results, machine, panel=panel, prefetch=distance)
        for panel, distance in ahead.items()
    }
    best = min(seconds, key=seconds.__getitem__)
    return best if seconds[best] * WORTH < seconds[0] else 0


def suits_streaming(results: Iterable[np.ndarray]) -> bool:
    """Return whether a result takes a large share of the last-level cache, where it would evict the operands."""
    return any(result.ndim > 1 and result.nbytes > SHARE * last_cache() for result in results)


def suits_checks(pointers: Sequence[str], arrays: Arrays, *, lanes: int) -> bool:
    """Return whether loops that validate indices as they read them take less time than a look at all before.

    They go entry by entry through short rows, whose ends the processor must predict, and twice through long ones. A
    second call for few entries takes longer than that.

    Parameters
    ----------
    pointers : sequence of str
        Names of row pointers.
    arrays : mapping of str to ndarray
    lanes : int
        Those of a ragged sum that suit the rows; 0 where it is best summed entry by entry.
    """
    for indptr in (arrays[name] for name in pointers if name in arrays):
        entries = int(indptr[-1]) if indptr.size else 0
        mean = entries / max(indptr.size - 1, 1)
        return entries <= FEW_CHECKED or (not lanes and not SHORT_CHECKED <= mean < LONG_CHECKED)
    return False


def suits_carry(pointers: Sequence[str], arrays: Arrays, threads: int) -> bool:
    """Return whether a row has more than `TIMES_SHARE` times a thread's share of the work (rows plus entries)."""
    if threads < 2:
        return False
    for indptr in (arrays[name] for name in pointers if name in arrays):
        if indptr.size < 2:
            continue
        work = indptr.size - 1 + int(indptr[-1])
        if has_longer_row(indptr, int(TIMES_SHARE * work / threads)):
            return True
    return False


def suitable_sums(usage: Usage, arrays: Arrays, own_sums: OwnSums | None = None) -> dict[str, int]:
    """Return how to sum ragged rows: in lanes of a vector, perhaps of staged terms; nothing leaves it to LLVM.

    Short rows of varying lengths are staged, so that no mispredicted exit of a loop over a row delays the loads of the
    next ones. Longer ones are summed in lanes as they are read if the gathered operand is near: lanes take more
    instructions, so that fewer loads are under way at a time. Where vectors are gathered by instructions this does not
    matter: rows are summed in lanes unless few entries are beyond whole vectors.
    """
    for name in usage.sums:
        indptr = arrays.get(name)
        if indptr is None or len(indptr) < 2:
            continue
        rows, lengths = len(indptr) - 1, some_lengths(indptr)
        mean, is_regular = int(indptr[-1]) / rows, share_of_changes(lengths) <= VARYING
        if own_sums is not None and not is_regular and rows >= LEARNT and mean <= STAGED_MEAN:
            fits = mean + mean**0.5 <= STAGED_LANES[0]  # most rows, if their lengths are Poisson distributed
            return {"lanes": STAGED_LANES[0] if fits else STAGED_LANES[1], "staged": STAGED_ROWS}
        operand = max((operand.nbytes for _, operand, _ in known(usage.gathers, arrays)), default=0)
        rest = float(np.mean(lengths % GATHERED_LANES))
        lanes = lanes_for(rows, mean, is_regular=is_regular, own_sums=own_sums, operand=operand, rest=rest)
        return {"lanes": lanes} if lanes else {}
    return {}


def lanes_for(
    rows: int, mean: float, *, is_regular: bool, own_sums: OwnSums | None, operand: int = 0, rest: float = 0.0
) -> int:
    """Return the lanes for sums along so many rows of so many entries of an operand of so many bytes; 0 for none.

    `rest` are the mean entries of a row beyond multiples of `GATHERED_LANES`. See `suitable_sums`.
    """
    if own_sums is None:
        return _lanes_in_order(mean, is_regular)
    if own_sums.gathers and rest >= LEAST_REST:
        return GATHERED_LANES
    is_mispredicted = not is_regular and rows >= LEARNT and STAGED_MEAN < mean < 4 * LANES
    is_near = operand <= NEAR * private_cache()
    is_long = mean >= (GATHERED_NEAR if is_near else GATHERED_LONG) and not own_sums.gathers
    return LANES if is_long or (is_mispredicted and is_near) else 0


def _lanes_in_order(mean: float, is_regular: bool) -> int:
    """Return the lanes for rows whose terms LLVM takes one by one.

    0 if rows fit in one vector and are as long as their neighbours: the processor predicts the loop exit then.
    """
    if mean >= LONG and not is_regular:
        return 2 * LANES
    return LANES if mean > LANES or not is_regular else 0


def suitable_tile(rows: Sequence[tuple[str, int]], arrays: Arrays) -> int:
    """Return the tile for dense rows that are summed and are shorter than the default tile; else 0.

    It holds the whole row: a rest of a row beside a shorter tile takes longer than unused lanes.
    """
    for name, dimension in rows:
        array = arrays.get(name)
        if array is not None and array.ndim > dimension and SHORT <= array.shape[dimension] < USUAL:
            return least_power(array.shape[dimension])
    return 0


def narrow_sizes(usage: Usage, arrays: Arrays) -> dict[str, int]:
    """Return the length of dense rows that are so short that compiling it in pays, by the name of the size.

    Nothing is returned for programs with dense rows of several lengths, and for rows of one element.
    """
    if len(usage.widths) != 1:
        return {}
    ((size, name, dimension),) = usage.widths
    array = arrays.get(name)
    if array is None or array.ndim <= dimension:
        return {}
    length = array.shape[dimension]
    return {size: length} if 1 < length <= NARROW else {}


def narrow_tile(usage: Usage, arrays: Arrays) -> dict[str, int]:
    """Return the tile for short rows whose length is compiled in; none where vectors run along other dimensions."""
    lengths = narrow_sizes(usage, arrays)
    along = [length for size, name, d in usage.widths if (length := lengths.get(size)) and d == arrays[name].ndim - 1]
    return {"tile": least_power(max(along))} if along else {}


def unaligned_operand(usage: Usage, arrays: Arrays, registers: Registers, written: Collection[str] = ()) -> str | None:
    """Return the operand of which a copy whose rows begin at cache lines is worth a trial; None where none is.

    Its gathered rows are read from more lines than they need, and it is read so much more often than copied that the
    copy may pay.

    Parameters
    ----------
    usage : Usage
    arrays : mapping of str to ndarray
    registers : Registers
    written : collection of str, optional
        Arrays that the program writes, which are not copied.
    """
    operands = {gather.operand for gather in usage.gathers}
    if len(operands) != 1 or not operands.isdisjoint(written):
        return None
    for gather, (indices, operand, rows) in zip(usage.gathers, known(usage.gathers, arrays), strict=False):
        if (
            gather.dimension == 0
            and padded_length(operand, registers)
            and indices.size >= COPIED_READS * rows
            and COPIED_FROM <= indices.size * (operand.nbytes // rows)
            and operand.nbytes <= (COPIED_BYTES if operand.nbytes <= 2 * LINE * rows else COPIED_LONG)
        ):
            return gather.operand
    return None


def padded_length(operand: np.ndarray, registers: Registers) -> int:
    """Return the elements from one row to the next of a copy whose rows begin at cache lines.

    It is that of the operand where rows are whole lines or parts of one, and 0 where a copy is not worth a trial. Only
    matrices have gaps between their rows.
    """
    row, item = operand[:1].nbytes, operand.itemsize
    padded = -(-row // LINE) * LINE if row > LINE else least_power(row)
    is_line = registers.bits >= 8 * LINE
    least = (COPIED_VECTORS if is_line else COPIED_LINES) * max(1, padded // LINE)
    if row > COPIED_ROW or lines_read(row, by_vectors=is_line) < least:
        return 0
    if row == padded:
        return operand.shape[-1]
    return padded // item if operand.ndim == 2 and padded % item == 0 else 0


def lines_read(row: int, *, by_vectors: bool = False) -> float:
    """Return from how many cache lines a row of some bytes is read, in the mean over rows without gaps.

    Parameters
    ----------
    row : int
    by_vectors : bool, optional
        Count a line for each vector as long as a line that reads from it.

    Examples
    --------
    >>> lines_read(64), lines_read(96), lines_read(128), lines_read(128, by_vectors=True)
    (2.0, 2.5, 3.0, 4.0)
    """
    begins = [(BEGINS + n * row) % LINE for n in range(LINE)]
    lines = sum(-(-(begin + row) // LINE) for begin in begins) / LINE
    if not by_vectors:
        return lines
    # Each vector but the first begins in the line where the one before it ended, unless that ended with the line.
    inner = -(-row // LINE) - 1
    return lines + inner * sum(begin > 0 for begin in begins) / LINE


def least_power(length: int) -> int:
    """Return the least power of two that is not below a positive number."""
    return 1 << (length - 1).bit_length()


def suitable_halves(
    gathers: Sequence[Gather], pointers: Sequence[str], rows: Sequence[tuple[str, int]], arrays: Arrays
) -> dict[str, int]:
    """Return the tile and the prefetch distance for dots with gathered rows that are best read in two halves.

    Halves do not pay where the rows come from memory, whose rows are best read at once, or from the private cache. They
    do not pay either where other rows are gathered too, as in attention: these would use the same tile.
    """
    cache, row = private_cache(), 2 * HALF
    present = ((name, arrays[name], d) for name, d in rows if name in arrays)
    summed = {name for name, array, d in present if array.ndim > d and array.shape[d] * array.itemsize == row}
    if mean_length(pointers, arrays) < MANY or not all(gather.operand in summed for gather in gathers):
        return {}
    for indices, operand, count in known(gathers, arrays):
        is_far = FETCHED_LATE * cache < operand.nbytes <= MEMORY * last_cache()
        if is_far and operand.nbytes == count * row and share_of_new(indices, cache // row) > NEW:
            return {"tile": HALF // operand.itemsize, "prefetch": AHEAD // HALF}
    return {}


# ------------------------------------------------------------------ searches


def sweep(base: Choices, *, over_format: bool = False) -> list[Choices]:
    """Return the choices that a coarse sweep tries besides `base`."""
    wide, narrow = {"tile": 2 * base.tile}, {"tile": max(base.tile // 2, 8)}
    tiles = [wide, narrow] if over_format else [wide, narrow, {**wide, "prefetch": 8}, {**narrow, "prefetch": 8}]
    return [base.changed(**changed) for changed in (*(SWEPT_OVER_FORMATS if over_format else SWEPT), *tiles)]


__all__ = [
    "PORTFOLIO",
    "changes",
    "gathered_seconds",
    "is_small",
    "lanes_for",
    "least_power",
    "narrow_sizes",
    "narrow_tile",
    "near_bytes",
    "predicted_seconds",
    "suitable_halves",
    "suitable_panel",
    "suitable_prefetch",
    "suitable_sums",
    "suitable_tile",
    "suits_carry",
    "suits_checks",
    "suits_streaming",
    "sweep",
    "unaligned_operand",
    "usual",
]
